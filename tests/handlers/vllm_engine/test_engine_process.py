"""The engine's process: forked by a worker at its start, ended with it, and started by vLLM where it cannot be forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pilotflame.handlers.vllm_engine import engine_process

# A worker: it builds the model, forks the engine's process, and goes on with `steps`.
WORKER = """
import asyncio, json, os, select, signal, sys, threading
from pathlib import Path
from types import SimpleNamespace
from pilotflame.handlers.vllm_engine import engine_process
from pilotflame.handlers.vllm_engine.model import VllmModel
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot

folder = Path(sys.argv[1])
snapshot = Snapshot(folder, create(folder))
snapshot.open()
model = VllmModel(snapshot)

def started():
    asyncio.run(model.setup(SimpleNamespace(retire=print)))
    return model._engine.core

if __name__ == "__main__":
    {steps}
"""
DOUBLE = Path(__file__).parents[2] / "vllm_double"


def worker(folder: Path, tmp_path: Path, *steps: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "worker.py"
    script.write_text(WORKER.replace("{steps}", "\n    ".join(steps)))
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(DOUBLE)}
    return subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, **single},
    )  # fmt: skip


def test_the_engine_runs_in_the_fork_with_what_the_worker_has_learned(folder: Path, tmp_path: Path) -> None:
    steps = (
        "model.forked()",
        "waiting = model._waiting",
        "os.environ['LEARNED'] = 'later'",
        "core = started()",
        "print(core.process is waiting, len(core.loaded), core.process.name, core.process.is_alive())",
        "print(core.environ['LEARNED'])",
        "model.teardown()",
        "print(waiting.exitcode, waiting.is_alive())",
    )
    done = worker(folder, tmp_path, *steps)
    assert done.stdout.splitlines() == ["True 4 EngineCore True", "later", "0 False"], done.stderr


def test_kernels_are_replaced_once_a_revision_and_not_in_each_engine(folder: Path, tmp_path: Path) -> None:
    """vLLM reads the names of all modules to replace kernels, which copies their memory in each fork."""
    steps = (
        "from vllm.platforms import current_platform as platform",
        "platform.register_triton_kernel_overrides()",
        "print(type(platform).overridden)",
    )
    assert worker(folder, tmp_path, *steps).stdout.split() == ["1"]


@pytest.mark.parametrize("starts", [False, True])
def test_the_engine_ends_when_its_worker_is_killed(folder: Path, tmp_path: Path, starts: bool) -> None:
    steps = (
        "model.forked()",
        *(["started()"] if starts else []),
        "print(model._waiting.pid, flush=True)",
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    done = worker(folder, tmp_path, *steps)
    assert done.returncode == -signal.SIGKILL, done.stderr
    try:
        descriptor = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    from select import select

    assert select([descriptor], [], [], 30)[0]
    os.close(descriptor)


def test_a_waiting_process_ends_when_its_worker_ends(folder: Path, tmp_path: Path) -> None:
    steps = (
        "model.forked()",
        "model._waiting._ours.close()",
        "model._waiting.join(30)",
        "print(model._waiting.exitcode)",
    )
    assert worker(folder, tmp_path, *steps).stdout.split() == ["0"]


def test_a_kill_has_its_signal_as_the_code(folder: Path, tmp_path: Path) -> None:
    steps = (
        "model.forked()",
        "core = started()",
        "core.process.kill()",
        "core.process.join(30)",
        "print(core.process.exitcode, core.alive)",
        "core.process.terminate()",
    )
    assert worker(folder, tmp_path, *steps).stdout.split() == ["-9", "False"]


@pytest.mark.parametrize(
    ("before", "why"),
    [
        ("threading.Thread(target=threading.Event().wait, daemon=True).start()", "has left 1 threads"),
        ("engine_process.NAMES['vllm.v1.engine.core:other'] = ()", "no vllm.v1.engine.core:other"),
        ("engine_process.NAMES['vllm.v1.engine.core:load'] = ('speed',)", "no vllm.v1.engine.core:load"),
        ("model._config.parallel_config.data_parallel_size = 2", "data_parallel_size is more than 1"),
        ("model._config.parallel_config.numa_bind = True", "numa_bind needs"),
        (
            "model._config.model_config.multimodal_config = SimpleNamespace(mm_tensor_ipc='torch_shm')",
            "mm_tensor_ipc is",
        ),
    ],
)
def test_where_it_cannot_be_forked_vllm_starts_it_and_the_log_says_why(
    folder: Path, tmp_path: Path, before: str, why: str
) -> None:
    steps = (
        before,
        "model.forked()",
        "core = started()",
        "print(type(core.process).__name__, len(core.loaded), flush=True)",
        "os._exit(0)",
    )
    done = worker(folder, tmp_path, *steps)
    assert (done.stdout.split(), done.returncode) == (["SpawnProcess", "4"], 0), done.stderr
    assert "tens of seconds: " in done.stderr
    assert why in done.stderr


@pytest.mark.parametrize("changed", [{"unknown": 1}, {"tensor_queue": object()}, {"vllm_config": object()}])
def test_a_call_that_the_fork_cannot_take_is_left_to_vllm_without_a_fork(
    vllm: Any, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine import utils

    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    waiting = engine_process.WaitingEngine.__new__(engine_process.WaitingEngine)
    waiting._config, waiting._asked = object(), {}
    given = {"vllm_config": waiting._config, "handshake_address": "a", "tensor_queue": None}
    with engine_process.engine_core_in(waiting):
        made = utils.get_mp_context().Process(target=print, name="x", kwargs=given | changed)
        assert (type(made).__name__, made.name) == ("SpawnProcess", "x")
        assert utils.get_mp_context().Process(target=print, name="x", kwargs=given) is waiting
        # The waiting engine runs only one engine core.
        assert utils.get_mp_context().Process(target=print, name="y", kwargs=given) is not waiting

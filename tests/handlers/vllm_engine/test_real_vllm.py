"""The template `vllm` with the real vLLM, for processors: the suites of clients, kills of its processes, and what it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
import trained_model
import vllm_environment
from live import Gateway, gateway_process, gone, short_folder

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not vllm_environment.exists(),
        reason="run `python tests/vllm_environment.py` first, which takes minutes",
    ),
]
ROOT = Path(__file__).resolve().parents[3]
SUITES = (
    "tests/runtime/plugins/openai/test_pypi_client.py", "tests/runtime/plugins/openai/test_tools.py",
    "tests/runtime/plugins/openai/test_npm_client.py", "tests/runtime/plugins/openai/test_other_clients.py",
    "tests/runtime/plugins/tgi/test_inference_client.py",
)  # fmt: skip
CALLERS, KILLS = 16, int(os.environ.get("PILOTFLAME_TEST_KILLS", "5"))
STARTS = int(os.environ.get("PILOTFLAME_TEST_STARTS", "3"))
# A name that makes paths of sockets longer than the kernel allows.
NAME = "a-name-that-is-longer-than-thirty-four-characters"


@pytest.fixture(scope="module")
def python() -> str:
    return str(vllm_environment.python())


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_of_clients_passes(python: str, suite: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", suite], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PILOTFLAME_TEST_ENGINE": "vllm"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(python: str) -> AsyncIterator[Gateway]:
    with pytest.MonkeyPatch.context() as patch, short_folder() as folder:
        # The patch ends with the module, so later tests of this process use our own engine.
        patch.setattr(trained_model, "ENGINE", "vllm")
        async with gateway_process(folder / "state", python=python) as gateway:
            await trained_model.deploy(gateway, folder, NAME, ["make_weights.py"])
            yield gateway


async def stream(gateway: Gateway) -> str:
    """Stream a text and return how it has ended: "[DONE]", or the code of an error."""
    body = {"model": NAME, "prompt": "A pilot flame", "max_tokens": 60, "temperature": 0, "stream": True}
    async with gateway.client.stream("POST", "/v1/completions", json=body, timeout=120) as answer:
        text = (await answer.aread()).decode()
    if text.rstrip().endswith("data: [DONE]"):
        return "[DONE]"
    found = re.search(r'"code": ?"(\w+)"', text)
    assert found is not None, (answer.status_code, text[-500:])
    return found[1]


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def families(gateway: Gateway) -> list[list[psutil.Process]]:
    """Return each of the function's workers with the process of its engine."""
    assert gateway.process is not None
    found = psutil.Process(gateway.process.pid).children(recursive=True)
    workers = [one for one in found if title(one).startswith("pilotflame: worker")]
    return [[one, *descendants(one)] for one in workers]


@pytest.mark.asyncio(loop_scope="module")
async def test_kills_end_in_answers_or_typed_errors_and_leave_nothing(served: Gateway) -> None:
    chosen, shared = random.Random(20261130), {*Path("/dev/shm").iterdir()}
    for _ in range(KILLS):
        assert await stream(served) == "[DONE]"
        async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(stream(served)) for _ in range(CALLERS)]
            await asyncio.sleep(chosen.random() / 4)
            # A slow machine may have started a second worker.
            victims = chosen.choice([family for family in families(served) if len(family) > 1])
            # A second worker may have ended by itself.
            with contextlib.suppress(psutil.NoSuchProcess):
                chosen.choice(victims).kill()
        assert {one.result() for one in running} <= {"[DONE]", "handler_failed", "worker_died"}
        # If a worker is killed, its engine ends, too. If an engine is killed, its worker ends.
        for victim in victims:
            await gone(victim.pid)
    assert await stream(served) == "[DONE]"
    assert {*Path("/dev/shm").iterdir()} == shared


@pytest.mark.asyncio(loop_scope="module")
async def test_starts_and_stops_leave_nothing(served: Gateway) -> None:
    def left() -> tuple[set[Path], set[Path]]:
        return {*Path("/dev/shm").iterdir()}, {path for path in served.state.rglob("*") if path.is_socket()}

    assert await stream(served) == "[DONE]"
    before = left()
    for _ in range(STARTS):
        for family in families(served):
            family[0].terminate()
            for process in family:
                await gone(process.pid)
        assert await stream(served) == "[DONE]"
    after = left()
    assert (after[0], len(after[1])) == (before[0], len(before[1]))


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_fails_tells_its_cause(served: Gateway, tmp_path: Path) -> None:
    source = served.state.parent / NAME
    handler = (
        (source / "handler.py")
        .read_text()
        .replace("kv_cache_memory_bytes=64 << 20", "kv_cache_memory_bytes=64")
    )
    (source / "handler.py").write_text(handler)
    answer: httpx.Response = await served.client.post(
        "/v1/functions", json={"path": str(source), "overrides": {"name": "small", "snapshot": str(source / "weights")}}, timeout=300,
    )  # fmt: skip
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "handler_setup_failed"
    assert "ValueError: " in error["details"]["printed"]
    assert "not enough GPU memory" in error["details"]["printed"]
    assert "(EngineCore pid=" in error["details"]["printed"]

"""vLLM's loader of snapshots."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pilotflame.errors import SnapshotChanged, SnapshotMismatch
from pilotflame.handlers.vllm_engine import loader
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from safetensors.torch import load_file

# A worker that starts the engine, says the engine's process id, and is killed.
WORKER = """
import asyncio, json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from pilotflame.handlers.vllm_engine.model import VllmModel
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    snapshot = Snapshot(folder, create(folder))
    snapshot.open()
    model = VllmModel(snapshot)
    asyncio.run(model.setup(SimpleNamespace(retire=print)))
    print(model._engine.core.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Model:
    """A model of vLLM with the parameters `wanted`."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self.wanted, self.loaded = list(wanted), list[tuple[str, torch.Tensor]]()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.loaded += weights
        return {name for name, _ in self.loaded}

    def named_parameters(self) -> list[tuple[str, None]]:
        return [(name, None) for name in self.wanted]

    def named_modules(self) -> list[Any]:
        return []


def load(snapshot: Snapshot, model: Model, quantization: str | None = None) -> None:
    from vllm.config import LoadConfig, ModelConfig
    from vllm.model_executor.model_loader import get_model_loader

    loader.register()
    made = get_model_loader(LoadConfig("pilotflame", json.loads(json.dumps(snapshot.reference()))))
    made.download_model(None)
    made.load_weights(model, ModelConfig(str(snapshot.path), 128, quantization))


def mapped(address: int) -> str:
    """Return the file that is mapped at an address of this process; "" if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, last = line.split()
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            return last
    return ""


def test_every_tensor_comes_once_with_its_bytes_and_without_a_copy(vllm: Any, snapshot: Snapshot) -> None:
    model = Model(one.name for one in snapshot.manifest.tensors)
    load(snapshot, model)
    wanted = load_file(snapshot.path / "model.safetensors")
    assert [name for name, _ in model.loaded] == [one.name for one in snapshot.manifest.tensors]
    for name, tensor in model.loaded:
        assert torch.equal(tensor, wanted[name])
        assert tensor.dtype == wanted[name].dtype
        assert mapped(tensor.data_ptr()).endswith("model.safetensors")


def test_a_tied_weight_comes_by_both_names(vllm: Any, snapshot: Snapshot) -> None:
    manifest = snapshot.manifest.model_copy(update={"aliases": {"head.weight": "norm.weight"}})
    tied = Snapshot(snapshot.path, manifest)
    tied.open()
    model = Model([])
    load(tied, model)
    found = dict(model.loaded)
    assert len(model.loaded) == len(manifest.tensors) + 1
    assert torch.equal(found["head.weight"], found["norm.weight"])


def test_a_file_that_was_replaced_since_the_deploy_is_refused(
    vllm: Any, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    manifest = create(tmp_path)
    snapshot = Snapshot(tmp_path, manifest, versions={})
    snapshot.open()
    load(snapshot, Model([]))
    (tmp_path / "other").write_bytes(bytes(manifest.total_bytes))
    (tmp_path / "other").rename(tmp_path / "model.safetensors")
    with pytest.raises(SnapshotChanged, match="was replaced"):
        load(snapshot, Model([]))


def test_a_parameter_without_a_tensor_is_named(vllm: Any, snapshot: Snapshot) -> None:
    with pytest.raises(SnapshotMismatch, match=r"1 parameters .* such as head\.weight"):
        load(snapshot, Model(["norm.weight", "head.weight"]))
    load(snapshot, Model(["norm.weight", "head.weight"]), quantization="fp8")


def test_a_parameter_that_vllm_makes_after_loading_needs_no_tensor(vllm: Any, snapshot: Snapshot) -> None:
    class Quantised(Model):
        def named_modules(self) -> list[Any]:
            # The model itself has the name "".
            made = SimpleNamespace(process_weights_after_loading=print)
            names = {"": "top_scale", "layer": "scale"}
            return [
                (
                    name,
                    SimpleNamespace(quant_method=made, named_parameters=lambda found=found: [(found, None)]),
                )
                for name, found in names.items()
            ]

    load(snapshot, Quantised(["norm.weight", "layer.scale", "top_scale"]))
    with pytest.raises(SnapshotMismatch, match=r"1 parameters .* such as layer\.zero"):
        load(snapshot, Quantised(["norm.weight", "layer.scale", "top_scale", "layer.zero"]))


def test_the_engine_ends_when_its_worker_is_killed(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    double = Path(__file__).parents[2] / "vllm_double"
    done = subprocess.run(
        [sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(double)},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(int(done.stdout))
        ended = select.select([descriptor], [], [], 30)[0]
        os.close(descriptor)
        assert ended

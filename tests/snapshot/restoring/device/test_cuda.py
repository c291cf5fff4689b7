"""Repeats tests of the simulated device on a CUDA device. The last tests need no device: they replace torch and record its calls."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from device_tests import DeviceTests
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.restoring.device import cuda
from pilotflame.snapshot.restoring.device.cuda import CudaDevice
from pilotflame.snapshot.restoring.device.pinned_shards import map_shared
from safetensors.torch import save_file
from torch import nn

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

WIDTH, LAYERS = 1024, 24


@on_cuda
class TestCudaDevice(DeviceTests):
    @pytest.fixture
    def device(self) -> CudaDevice:
        return CudaDevice(0)


@on_cuda
def test_memory_that_cannot_be_pinned_leaves_no_error_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4096))
    with (tmp_path / "file").open("rb") as file:
        beyond_the_end = map_shared(file.fileno(), 4096)
    device = CudaDevice(0)
    (tmp_path / "file").write_bytes(b"")
    assert not device.pin(beyond_the_end)
    assert float((torch.ones(4, device="cuda") + 1).sum()) == 8


def net(device: str) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).eval()


@pytest.fixture
def stored(tmp_path: Path) -> tuple[nn.Module, Path, Manifest]:
    torch.manual_seed(0)
    whole = net("cpu")
    save_file(dict(whole.state_dict()), tmp_path / "model.safetensors")
    return whole, tmp_path, create(tmp_path)


def restored(root: Path, manifest: Manifest, **options: bool) -> tuple[nn.Module, Snapshots]:
    module = net("meta")
    if options:
        module = module.to(torch.bfloat16)
    snapshot = Snapshot(root, manifest)
    snapshots = Snapshots([snapshot])
    snapshot.restore(module, device="cuda", **options)
    snapshots.blank()
    snapshots.open()
    return module, snapshots


def answer(module: nn.Module, snapshots: Snapshots, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode(), snapshots.gate():
        return module(torch.ones(2, WIDTH, device="cuda", dtype=dtype)).cpu()


@on_cuda
def test_a_module_that_runs_while_it_is_copied_answers_as_one_that_was_moved(
    stored: tuple[nn.Module, Path, Manifest],
) -> None:
    whole, root, manifest = stored
    moved = whole.to("cuda")
    with torch.inference_mode():
        right = moved(torch.ones(2, WIDTH, device="cuda")).cpu()
    for _ in range(20):
        module, snapshots = restored(root, manifest)
        assert torch.equal(answer(module, snapshots), right)
        snapshots.wait(20)
        assert all(one.data_ptr() % 256 == 0 for one in module.parameters())
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, moved.state_dict()[name])


@on_cuda
def test_the_device_converts(stored: tuple[nn.Module, Path, Manifest]) -> None:
    whole, root, manifest = stored
    module, snapshots = restored(root, manifest, cast=True)
    snapshots.wait(20)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), whole.state_dict()[name].bfloat16())


@on_cuda
def test_parking_gives_the_memory_back(stored: tuple[nn.Module, Path, Manifest]) -> None:
    _, root, manifest = stored
    module, snapshots = restored(root, manifest)
    snapshots.wait(20)
    with torch.no_grad():
        module[3].weight.data.mul_(2)
    right, held = answer(module, snapshots), torch.cuda.memory_reserved()
    for _ in range(10):
        freed = snapshots.park()
        assert freed >= manifest.total_bytes * 0.99
        assert torch.cuda.memory_reserved() <= held - 0.95 * freed
        snapshots.unpark()
        assert torch.equal(answer(module, snapshots), right)
    snapshots.wait(20)
    assert torch.cuda.memory_reserved() <= 1.1 * held


# -- without a device


class Noted(torch.Tensor):
    """A tensor in host memory that notes the streams of all calls of `record_stream`."""

    notes: ClassVar[list[Any]] = []

    def record_stream(self, stream: Any) -> None:
        self.notes.append(stream)


class Scripted:
    """Takes the place of torch in cuda.py, and allocates in host memory. `overrides` replace names of torch.cuda."""

    def __init__(self, **overrides: Any) -> None:
        nothing = nullcontext()
        self.cuda = SimpleNamespace(
            is_available=lambda: True, device_count=lambda: 1, Stream=lambda device: "copies",
            default_stream=lambda device: "default", current_stream=lambda device: "current",
            device=lambda device: nothing, stream=lambda stream: nothing, empty_cache=lambda: None,
            OutOfMemoryError=torch.cuda.OutOfMemoryError,
        )  # fmt: skip
        vars(self.cuda).update(overrides)
        # Like torch.accelerator of torch 2.11, it has no function that empties the cache of pinned memory.
        self.accelerator = SimpleNamespace()

    def empty(self, size: int, **options: Any) -> torch.Tensor:
        return torch.empty(size, dtype=options["dtype"]).as_subclass(Noted)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    Noted.notes.clear()
    monkeypatch.setattr(cuda, "torch", Scripted())
    return CudaDevice(0)


def test_memory_is_given_back_with_a_torch_that_cannot_empty_the_host_cache(scripted: CudaDevice) -> None:
    scripted.release()


def test_memory_that_is_allocated_again_is_recorded_for_the_default_stream_as_at_first(
    scripted: CudaDevice,
) -> None:
    slab = scripted.empty(64)
    assert Noted.notes == ["default"]
    scripted.resize(slab.untyped_storage(), 0, copied_to=True)
    assert Noted.notes == ["default"]
    scripted.resize(slab.untyped_storage(), 64, copied_to=True)
    assert Noted.notes == ["default", "default"]

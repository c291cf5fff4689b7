"""The same as with the simulated device, on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.restoring.device.device import find_device
from safetensors.torch import save_file
from torch import nn

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

WIDTH, LAYERS = 1024, 24


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
    snapshot.restore(module, device="cuda", **options)
    snapshot.blank()
    snapshot.open()
    return module, Snapshots([snapshot])


def answer(module: nn.Module, snapshots: Snapshots, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.inference_mode(), snapshots.gate():
        return module(torch.ones(2, WIDTH, device="cuda", dtype=dtype)).cpu()


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


def test_the_device_converts(stored: tuple[nn.Module, Path, Manifest]) -> None:
    whole, root, manifest = stored
    module, snapshots = restored(root, manifest, cast=True)
    snapshots.wait(20)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.cpu(), whole.state_dict()[name].bfloat16())


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


def test_weights_without_room_are_refused_with_what_there_is(tmp_path: Path) -> None:
    device = find_device("cuda")
    assert device is not None
    with pytest.raises(SnapshotError, match=r"need \d+ bytes on cuda:0, which has \d+ of \d+ free"):
        device.empty(1 << 50)

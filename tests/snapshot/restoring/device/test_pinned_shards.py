"""Files are pinned ahead of a copy to a simulated device, which refuses copies from memory that was unpinned."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.restoring.device import pinned_shards, slab
from safetensors.torch import save_file
from simulated_device import SimulatedDevice, simulated
from torch import nn

PAGE = 4096
WAIT_S = 20.0


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    """The device of this test alone, with small windows and pieces."""
    monkeypatch.setattr(pinned_shards, "WINDOW_BYTES", 2 * PAGE)
    monkeypatch.setattr(slab.SlabLayout.__init__, "__defaults__", (3 * PAGE,))
    simulated.cache_clear()
    return simulated()


def net(place: str = "cpu") -> nn.Module:
    with torch.device(place):
        return nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96), nn.Linear(96, 32, bias=False)).eval()


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path, Manifest]:
    torch.manual_seed(0)
    whole, folder = net(), tmp_path_factory.mktemp("stored")
    save_file(dict(whole.state_dict()), folder / "model.safetensors")
    return whole, folder, create(folder)


def standby(stored: tuple[nn.Module, Path, Manifest]) -> tuple[nn.Module, Snapshots]:
    module, snapshot = net("meta"), Snapshot(*stored[1:])
    snapshot.restore(module, device="simulated")
    snapshots = Snapshots([snapshot])
    snapshots.blank()
    return module, snapshots


def times(count: int) -> Callable[[], bool]:
    """Return a function that returns False `count` times, and then True."""
    left = [False] * count
    return lambda: not left or left.pop()


def opened(module: nn.Module, snapshots: Snapshots) -> None:
    snapshots.open()
    with torch.inference_mode(), snapshots.gate():
        module(torch.ones(2, 96))
    snapshots.wait(WAIT_S)


@pytest.mark.parametrize("windows", [0, 1, 3, 100])
def test_weights_of_which_any_part_is_pinned_arrive(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, windows: int
) -> None:
    module, snapshots = standby(stored)
    snapshots.pin(times(windows))
    total = -(-stored[2].shards[0].size_bytes // (2 * PAGE))
    assert len(here._pinned) == min(windows, total)
    for _ in range(2):
        opened(module, snapshots) if not snapshots[""].modules.uploads else snapshots.unpark()
        snapshots.wait(WAIT_S)
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, stored[0].state_dict()[name])
        snapshots.park()
    del module, snapshots
    gc.collect()
    assert here._pinned == {}


def test_what_is_pinned_needs_no_buffer(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, snapshots = standby(stored)
    snapshots.pin(lambda: False)

    def refuse(size_bytes: int) -> torch.Tensor:
        raise AssertionError("a buffer is taken")

    monkeypatch.setattr(here.buffers, "take", refuse)
    opened(module, snapshots)


def test_no_more_is_pinned_than_the_machine_allows(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned_shards, "memory_bytes", lambda: 24 * PAGE)
    module, snapshots = standby(stored)
    snapshots.pin(lambda: False)
    assert here.pinned_bytes() == 6 * PAGE
    opened(module, snapshots)


@pytest.mark.parametrize(("share", "pinned"), [(0.0, False), (0.25, False), (0.75, True)])
def test_nothing_is_pinned_if_the_kernel_does_not_count_it(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, monkeypatch: pytest.MonkeyPatch,
    share: float, pinned: bool,
) -> None:  # fmt: skip
    real = here.pinned_bytes
    monkeypatch.setattr(here, "pinned_bytes", lambda: int(share * real()))
    monkeypatch.setattr(pinned_shards, "CHECKED_BYTES", PAGE)
    module, snapshots = standby(stored)
    snapshots.pin(lambda: False)
    assert bool(here._pinned) == pinned
    opened(module, snapshots)


def test_a_file_that_was_replaced_comes_back_from_the_old_one(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes((stored[1] / "model.safetensors").read_bytes())
    (tmp_path / "other").write_bytes(b"other")
    module, snapshots = standby((stored[0], tmp_path, create(tmp_path)))
    snapshots.pin(lambda: False)
    opened(module, snapshots)
    right = {name: tensor.cpu() for name, tensor in module.state_dict().items()}
    snapshots.park()
    (tmp_path / "other").replace(tmp_path / "model.safetensors")
    snapshots.unpark()
    snapshots.wait(WAIT_S)
    assert all(torch.equal(tensor.cpu(), right[name]) for name, tensor in module.state_dict().items())


def test_a_file_that_is_gone_is_not_pinned(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes((stored[1] / "model.safetensors").read_bytes())
    _, snapshots = standby((stored[0], tmp_path, create(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    snapshots.pin(lambda: False)
    assert here._pinned == {}


@pytest.mark.parametrize("error", [SnapshotError("gone"), OSError("stale")])
def test_shards_that_cannot_be_opened_are_not_pinned(
    stored: tuple[nn.Module, Path, Manifest], here: SimulatedDevice, error: Exception
) -> None:
    def refuse(_name: str) -> int:
        raise error

    assert pinned_shards.shards_to_pin(here, stored[2], refuse) is None


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 40_000), st.integers(1, 20_000)), min_size=1, max_size=6))
def test_parts_are_the_bytes_of_the_segments_and_lie_in_one_window(segments: list[tuple[int, int]]) -> None:
    flat = torch.arange(60_000, dtype=torch.int32).to(torch.uint8)
    shards = pinned_shards.PinnedShards(SimulatedDevice(delay_s=0.0), [flat])
    at, made = 0, list[slab.Segment]()
    for begin, size in segments:
        made.append(slab.Segment(0, begin, begin + size, at))
        at += size
    piece = slab.SlabPiece(slab.SLAB, 0, at, tuple(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned_shards, "WINDOW_BYTES", 8192)
        patch.setattr(pinned_shards, "MOST_PARTS", 100)
        found = shards.divided(piece)
    assert found is not None
    joined = torch.zeros(at, dtype=torch.uint8)
    for part, where in found:
        joined[where : where + len(part)] = part
        first = part.storage_offset()
        assert first // 8192 == (first + len(part) - 1) // 8192
    assert torch.equal(joined, torch.cat([flat[one.begin : one.end] for one in made]))

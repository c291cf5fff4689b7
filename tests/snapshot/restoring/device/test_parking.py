"""Parking gives the memory of a device back. Unparking restores the weights, with the changes that the handler has made."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.errors import SnapshotChanged, SnapshotError
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots
from pilotflame.snapshot.restoring.device import buffers, slab
from pilotflame.snapshot.restoring.device.device import find_device
from pilotflame.snapshot.restoring.device.slab_copies import checksum, random_factors
from pilotflame.snapshot.restoring.inner_tensors import tensors_with_bytes
from safetensors.torch import save_file
from simulated_device import SimulatedDevice
from torch import nn
from wrapper_weights import wrap

WIDTH, LAYERS = 64, 12
X = torch.ones(2, WIDTH)


class Net(nn.Module):
    """Layers, of which the last is converted from another dtype, and a buffer that the snapshot does not fill."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        self.register_buffer("scale", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.scale
        return self.last(x.double())


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "MOST_THREADS", 3)
    monkeypatch.setattr(slab.SlabLayout.__init__, "__defaults__", (24_000,))


@pytest.fixture(params=["plain", "wrapped"])
def stored(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, Manifest]:
    torch.manual_seed(0)
    inner = ".held" if request.param == "wrapped" else ""
    tensors = {name + inner: tensor.float() for name, tensor in Net().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path, create(tmp_path)


def skeleton(stored: tuple[Path, Manifest]) -> Net:
    with torch.device("meta"):
        net = Net()
    net.scale = torch.full((WIDTH,), 0.25)
    wrapped = stored[1].tensors[0].name.endswith(".held")
    return (wrap(net) if wrapped else net).eval()


def restored(stored: tuple[Path, Manifest], **options: Any) -> tuple[Net, Snapshots]:
    net, snapshot = skeleton(stored), Snapshot(*stored, **options)
    snapshot.restore(net, device="simulated", cast=True)
    snapshot.open()
    snapshot.wait(20)
    return net, Snapshots([snapshot])


def answer(net: Net, snapshots: Snapshots) -> torch.Tensor:
    with torch.inference_mode(), snapshots.gate():
        return net(X)


def held_bytes(net: Net) -> int:
    tensors = (one for tensor in (*net.parameters(), *net.buffers()) for one in tensors_with_bytes(tensor))
    storages = (one.untyped_storage() for one in tensors)
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


def test_the_memory_is_given_back_and_the_answers_stay(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    wanted, before, objects = answer(net, snapshots), held_bytes(net), list(net.parameters())
    for _ in range(20):
        assert snapshots.park() == before
        assert held_bytes(net) == 0
        # A second `park` frees nothing.
        assert snapshots.park() == 0
        snapshots.unpark()
        assert torch.equal(answer(net, snapshots), wanted)
        snapshots.unpark()
        snapshots.wait(20)
    assert held_bytes(net) == before
    assert all(one is other for one, other in zip(objects, net.parameters(), strict=True))


def test_operations_that_still_run_read_the_weights_before_their_memory_is_given_back(
    stored: tuple[Path, Manifest],
) -> None:
    (net, snapshots), device = restored(stored), find_device("simulated")
    assert isinstance(device, SimulatedDevice)
    (weight,), seen = tensors_with_bytes(net.layers[0].weight), list[torch.Tensor]()
    wanted = weight.clone()
    for _ in range(20):
        device.submit(device.streams[0], lambda found: seen.append(found.clone()), weight)
    snapshots.park()
    assert len(seen) == 20
    assert all(torch.equal(one, wanted) for one in seen)


def test_what_the_handler_has_changed_is_kept_also_for_the_second_time(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    with torch.no_grad():
        # Change a weight without its version counter, permute a weight in place, and change a converted weight and a buffer.
        net.layers[3].weight.data.mul_(2)
        net.layers[7].weight.copy_(net.layers[7].weight.flip(0))
        net.last.weight[0, 0] += 1
        net.scale.add_(1)
    wanted = answer(net, snapshots)
    for _ in range(3):
        snapshots.park()
        snapshots.unpark()
        assert torch.equal(answer(net, snapshots), wanted)
    with torch.no_grad():
        net.layers[0].bias.zero_()
    wanted = answer(net, snapshots)
    snapshots.park()
    snapshots.unpark()
    assert torch.equal(answer(net, snapshots), wanted)


def test_only_what_has_changed_is_kept_on_the_host(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    snapshots.park()
    assert [len(one.kept) for _, one in snapshots[""].modules._parked] == [0]
    snapshots.unpark()
    snapshots.wait(20)
    with torch.no_grad():
        net.layers[5].bias[0] += 1
    snapshots.park()
    assert [len(one.kept) for _, one in snapshots[""].modules._parked] == [1]


def test_weights_that_are_gone_when_they_are_needed_again_are_an_error(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    snapshots.park()
    os.truncate(stored[0] / "model.safetensors", 100)
    snapshots.unpark()
    with pytest.raises(SnapshotChanged, match=r"model\.safetensors ends at byte \d+"):
        answer(net, snapshots)


def test_an_unpark_that_fails_can_be_tried_again(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    with torch.no_grad():
        net.layers[2].bias.add_(1)
    right = answer(net, snapshots)
    snapshots.park()
    file = stored[0] / "model.safetensors"
    content = file.read_bytes()
    os.truncate(file, 100)
    snapshots.unpark()
    with pytest.raises(SnapshotError):
        snapshots.wait(20)
    assert snapshots.park() > 0
    file.write_bytes(content)
    snapshots.unpark()
    assert torch.equal(answer(net, snapshots), right)


def test_changes_of_what_an_unpark_that_fails_has_copied_are_kept(tmp_path: Path) -> None:
    """The unpark fails because the last shard is truncated. The handler changes a tensor of the first shard, and is parked again."""
    torch.manual_seed(0)
    tensors, last = Net().state_dict(), "last.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != last}, tmp_path / "a.safetensors")
    save_file({last: tensors[last]}, tmp_path / "b.safetensors")
    shards = {name: "b.safetensors" if name == last else "a.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    net, snapshots = restored((tmp_path, create(tmp_path)))
    snapshots.park()
    content = (tmp_path / "b.safetensors").read_bytes()
    os.truncate(tmp_path / "b.safetensors", 100)
    snapshots.unpark()
    with pytest.raises(SnapshotError):
        snapshots.wait(20)
    with torch.no_grad(), snapshots.gate():
        net.layers[2].bias.add_(1)
    snapshots.park()
    (tmp_path / "b.safetensors").write_bytes(content)
    snapshots.unpark()
    snapshots.wait(20)
    assert torch.equal(net.layers[2].bias.cpu(), tensors["layers.2.bias"] + 1)
    assert torch.equal(net.layers[1].bias.cpu(), tensors["layers.1.bias"])


def test_a_file_that_was_replaced_meanwhile_comes_back_from_the_old_one(
    stored: tuple[Path, Manifest],
) -> None:
    net, snapshots = restored(stored)
    right = answer(net, snapshots)
    snapshots.park()
    file = stored[0] / "model.safetensors"
    (stored[0] / "other").write_bytes(b"other")
    (stored[0] / "other").rename(file)
    snapshots.unpark()
    assert torch.equal(answer(net, snapshots), right)


def test_a_file_that_was_written_to_meanwhile_is_refused(stored: tuple[Path, Manifest]) -> None:
    _, snapshots = restored(stored, versions={})
    snapshots.park()
    with (stored[0] / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"else")
    snapshots.unpark()
    for see in (lambda: snapshots.wait(20), snapshots.check):
        with pytest.raises(SnapshotChanged, match=r"model\.safetensors .* was replaced or written to"):
            see()


def test_a_module_of_which_everything_has_changed(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(8, 8)}, tmp_path / "model.safetensors")
    module, snapshot = nn.Linear(8, 8, bias=False, device="meta"), Snapshot(tmp_path, create(tmp_path))
    snapshot.restore(module, device="simulated")
    snapshot.open()
    snapshots = Snapshots([snapshot])
    snapshots.wait(20)
    with torch.no_grad():
        module.weight.neg_()
    snapshots.park()
    snapshots.unpark()
    snapshots.wait(20)
    assert torch.equal(module.weight, -torch.ones(8, 8))


def test_a_module_of_two_snapshots_is_parked_and_comes_back(tmp_path: Path) -> None:
    named = []
    for name, tensors in (
        ("base", {"0.weight": torch.randn(8, 8)}),
        ("style", {"1.weight": torch.randn(8, 8)}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        named.append(Snapshot(tmp_path / name, create(tmp_path / name), name=name))
    snapshots = Snapshots(named)
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False, device="meta") for _ in range(2)))
    snapshots.restore(module, device="simulated")
    snapshots.open()
    snapshots.wait(20)
    right = module(torch.ones(8))
    for _ in range(3):
        assert snapshots.park() == 2 * 256
        snapshots.unpark()
        snapshots.wait(20)
        assert torch.equal(module(torch.ones(8)), right)


def test_what_is_restored_in_inference_mode_can_be_parked(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    late = skeleton(stored)
    with torch.inference_mode():
        snapshots[""].restore(late, device="simulated", cast=True)
        right = answer(net, snapshots)
        assert torch.equal(late(X), right)
        snapshots.park()
        snapshots.unpark()
        assert torch.equal(answer(late, snapshots), right)


def test_the_memory_of_a_module_that_is_gone_is_freed(stored: tuple[Path, Manifest]) -> None:
    _, snapshots = restored(stored)
    slabs = []
    for _ in range(3):
        late = skeleton(stored)
        snapshots[""].restore(late, device="simulated", cast=True)
        slabs.append(weakref.ref(snapshots[""].modules.uploads[-1].slab))
    del late
    gc.collect()
    assert [slab() is None for slab in slabs] == [True, True, False]


def test_a_tensor_whose_storage_has_no_data_is_left_alone(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    net.register_buffer("functional", torch._to_functional_tensor(torch.ones(WIDTH)))
    right = answer(net, snapshots)
    assert snapshots.park() > 0
    snapshots.unpark()
    assert torch.equal(answer(net, snapshots), right)


def test_a_module_that_is_parked_without_checksums_is_kept_whole(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored, parks=False)
    with torch.no_grad():
        net.layers[3].weight.data.mul_(2)
    right = answer(net, snapshots)
    upload_, *_ = snapshots[""].modules.uploads
    assert upload_.copies.sums == {}
    for _ in range(2):
        snapshots.park()
        snapshots.unpark()
        assert torch.equal(answer(net, snapshots), right)


def test_neither_parking_nor_waking_pins_memory(stored: tuple[Path, Manifest]) -> None:
    net, snapshots = restored(stored)
    device = find_device("simulated")
    assert isinstance(device, SimulatedDevice)
    before = device.pins_left
    for _ in range(3):
        with torch.no_grad():
            net.layers[3].bias.add_(1)
        snapshots.park()
        snapshots.unpark()
        snapshots.wait(20)
    assert device.pins_left == before


def test_a_cold_restore_draws_no_random_numbers_of_the_handler(stored: tuple[Path, Manifest]) -> None:
    torch.manual_seed(7)
    right = torch.rand(3)
    random_factors.cache_clear()
    torch.manual_seed(7)
    restored(stored)
    assert torch.equal(torch.rand(3), right)


SIGNS = {
    "a column of bf16": (torch.bfloat16, lambda w: w[:, 3].neg_()),
    "every second of fp32": (torch.float32, lambda w: w[:, 1::2].neg_()),
    "all of fp64": (torch.float64, lambda w: w.neg_()),
    "two rows change places": (torch.float32, lambda w: w.copy_(w.flip(0))),
    "two words change places": (torch.float64, lambda w: w[0].copy_(w[0].flip(0))),
}


@pytest.mark.parametrize("what", SIGNS)
def test_a_checksum_changes_with_signs_and_places(what: str) -> None:
    torch.manual_seed(0)
    dtype, change = SIGNS[what]
    weight = torch.randn(64, 64).to(dtype)
    factors = random_factors(weight.device)
    before = int(checksum(weight.view(-1).view(torch.uint8), factors))
    change(weight)
    assert int(checksum(weight.view(-1).view(torch.uint8), factors)) != before


def test_a_checksum_changes_with_each_bit_also_in_later_blocks() -> None:
    content = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    factors = random_factors(content.device)[:16]
    before = int(checksum(content, factors))
    assert int(checksum(content.clone(), factors)) == before
    for at in (0, 7, 8, 127, 128, 500, 999):
        for bit in (1, 128):
            other = content.clone()
            other[at] ^= bit
            assert int(checksum(other, factors)) != before
    blocks = content[:256].view(2, 128)
    assert int(checksum(blocks.flip(0).reshape(-1), factors)) != int(checksum(content[:256], factors))
    assert int(checksum(content[:0], factors)) == 0

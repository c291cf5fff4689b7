"""Slices: a module that has a part of each weight gets views of that part, and waits for its bytes only."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SnapshotError, SnapshotMismatch
from pilotflame.snapshot.fetching.arrival import Arrival
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.restoring.gate import Gate, Unlanded
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, restore
from safetensors.torch import save_file
from torch import nn

Save = Callable[..., tuple[Path, Manifest]]


def opened(root: Path, manifest: Manifest) -> Snapshot:
    snapshot = Snapshot(root, manifest)
    snapshot.open()
    return snapshot


class Block(nn.Module):
    """A block of a transformer as one rank of `world` has it: rows of the first matrix, columns of the second."""

    def __init__(self, world: int = 1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up_proj = nn.Linear(8, 16 // world)
        self.down_proj = nn.Linear(16 // world, 8, bias=False)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(self.norm(given))))


def plan_of(rank: int, world: int) -> dict[str, tuple[int, int, int]]:
    return {"up_proj.*": (0, rank, world), "*down_proj.weight": (1, rank, world)}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_ranks_of_a_group_add_up_to_the_whole(save: Save, world: int) -> None:
    whole = Block()
    root, manifest = save(whole.state_dict())
    given, answer = torch.rand(3, 8), torch.zeros(3, 8)
    for rank in range(world):
        part, snapshot = Block(world), Snapshot(root, manifest)
        snapshot.restore(part, slices=plan_of(rank, world))
        snapshot.modules.blank()
        snapshot.open()
        answer += part(given)
        # Nothing was copied.
        begin = snapshot._mapping.flats[0].data_ptr()  # type: ignore[union-attr]
        end = begin + manifest.total_bytes
        assert all(begin <= weight.data_ptr() < end for weight in part.parameters())
    torch.testing.assert_close(answer, whole(given))


shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4)


@given(shapes, st.data())
def test_a_slice_is_that_of_torch(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([torch.int16, torch.float64, torch.bool, torch.float4_e2m1fn_x2]))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    world = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, world - 1))
    shape[dim] *= world
    count = torch.Size(shape).numel() * dtype.itemsize
    tensor = torch.randint(0, 2, (count,), dtype=torch.uint8).view(dtype).reshape(shape)
    root = tmp_path_factory.mktemp("slices")
    save_file(
        {"before": torch.ones(data.draw(st.integers(0, 3)), dtype=torch.int8), "t": tensor},
        root / "m.safetensors",
    )
    found = opened(root, create(root)).load("t", slices={"t": (dim, rank, world)})["t"]
    wanted = tensor.chunk(world, dim)[rank] if tensor.shape[dim] else tensor
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.view(torch.uint8).tolist() == wanted.view(torch.uint8).tolist()


def unaligned(root: Path) -> torch.Tensor:
    """Write a file whose tensor of floats begins at an odd byte."""
    values = torch.rand(4, 6)
    entries = {
        "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "t": {"dtype": "F32", "shape": [4, 6], "data_offsets": [1, 97]},
    }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    data = b"\0" + values.numpy().tobytes()
    (root / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return values


@pytest.mark.parametrize("dim", [0, 1])
def test_a_slice_that_must_be_copied_is_right(tmp_path: Path, dim: int) -> None:
    values = unaligned(tmp_path)
    wanted = values.chunk(2, dim)[1]
    manifest = create(tmp_path)
    module = nn.Module()
    module.t = nn.Parameter(torch.empty(wanted.shape))
    half = nn.Module()
    half.t = nn.Parameter(torch.empty(wanted.shape, dtype=torch.float16))
    for target, cast in ((module, False), (half, True)):
        snapshot = Snapshot(tmp_path, manifest)
        snapshot.restore(target, ignore=["pad"], slices={"t": (dim, 1, 2)}, cast=cast)
        snapshot.open()
        assert target.t.is_contiguous()
        assert torch.equal(target.t, wanted.to(target.t.dtype))


@pytest.mark.parametrize(
    ("slices", "fault"),
    [
        ({"up_proj*": (0, 2, 2)}, "there is no slice 2 of 2"),
        ({"up_proj*": (0, -1, 2)}, "there is no slice -1 of 2"),
        ({"up_proj*": (0, 0, 0)}, "there is no slice 0 of 0"),
        ({"up_proj*": (2, 0, 2)}, r"up_proj.weight: \[16, 8\] has no dimension 2"),
        ({"up_proj*": (0, 0, 3)}, r"up_proj.bias: \[16\] is not divisible by 3 along dimension 0"),
        ({"up_proj*": (0, 0, 4)}, r"of another shape \(up_proj.weight \[4, 8\], not \[8, 8\]"),
        ({"upproj": (0, 0, 2)}, "name that fits 'upproj'"),
        ({"*.bias.*": (0, 0, 2)}, r"fits '\*.bias.\*'"),
    ],
)
def test_a_slice_that_cannot_be_is_named(
    save: Save, slices: dict[str, tuple[int, int, int]], fault: str
) -> None:
    root, manifest = save(Block().state_dict())
    with pytest.raises(SnapshotMismatch, match=fault):
        make_plan(Block(2), manifest, slices=slices)
    if "another shape" not in fault:
        with pytest.raises(SnapshotMismatch):
            opened(root, manifest).load("up_proj*", slices=slices)


def test_the_first_pattern_counts(save: Save) -> None:
    root, manifest = save({"a.weight": torch.arange(8.0), "b.weight": torch.arange(8.0)})
    found = opened(root, manifest).load("*", slices={"a.*": (0, 1, 2), "*weight": (0, 1, 4)})
    assert found["a.weight"].tolist() == [4, 5, 6, 7]
    assert found["b.weight"].tolist() == [2, 3]


def test_an_alias_is_cut_too(save: Save) -> None:
    root, manifest = save({"a": torch.arange(4.0)}, metadata={"b": "a"})
    found = opened(root, manifest).load("*", slices={"b": (0, 1, 2)})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0, 1, 2, 3], [2, 3])


def test_nothing_is_loaded_before_the_snapshot_is_open(save: Save) -> None:
    root, manifest = save({"a": torch.ones(2)})
    with pytest.raises(SnapshotError, match="not open yet"):
        Snapshot(root, manifest).load("a")
    with pytest.raises(SnapshotMismatch, match="fits 'z'"):
        opened(root, manifest).load("a", "z")


def test_rows_wait_for_their_own_chunks(save: Save) -> None:
    tensors = {"weight": torch.rand(64, 512)}
    root, manifest = save(tensors, chunk_bytes=4096)
    arrival = Arrival(manifest)
    mapping = Mapping(root, manifest, arrival=arrival)
    demanded: list[int] = []

    def land(first: int, last: int) -> None:
        demanded.extend(range(first, last + 1))
        for chunk in range(first, last + 1):
            arrival.land(chunk)

    arrival.on_demand(land)
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.empty(16, 512), requires_grad=False)
    restore(make_plan(module, manifest, slices={"weight": (0, 2, 4)}), mapping)
    with Gate(Unlanded(mapping, arrival)):
        assert torch.equal(module.weight + 0, tensors["weight"][32:48])
    begin = manifest.tensors[0].offset_bytes + 32 * 2048
    assert demanded == list(range(begin // 4096, (begin + 16 * 2048 - 1) // 4096 + 1))

"""The layout of a slab: every byte is copied once, to a place that is aligned and that no other tensor has."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.restoring.device.slab import ALIGN_BYTES, SLAB, Segment, SlabLayout, Wanted
from pilotflame.snapshot.restoring.place import Elements


def contiguous(begin: int, count: int, dtype: torch.dtype = torch.float32) -> Elements:
    return Elements(dtype, (count,), (1,), begin, begin + count * dtype.itemsize)


def sliced(begin: int, rows: int, width: int, world: int, dtype: torch.dtype = torch.float32) -> Elements:
    """Return the elements of the last of `world` slices of the columns."""
    cut, size = width // world, dtype.itemsize
    first = begin + (width - cut) * size
    reach = (rows - 1) * width + cut if rows and cut else 0
    return Elements(dtype, (rows, cut), (width, 1), first, first + reach * size)


def read(segment: Segment, file: torch.Tensor) -> torch.Tensor:
    found = file[segment.begin : segment.end]
    if not segment.step:
        return found
    return found.as_strided((segment.runs, segment.run), (segment.step, 1)).reshape(-1)


def stored_bytes(where: Elements, file: torch.Tensor) -> torch.Tensor:
    found = file[where.begin_bytes : where.end_bytes].clone().view(where.dtype)
    return found.as_strided(where.shape, where.stride).contiguous().view(-1).view(torch.uint8)


@st.composite
def wanted(draw: st.DrawFn) -> tuple[list[Wanted], list[str]]:
    """Draw tensors and an order of first touch. The tensors are in up to three shards, with gaps. Some are slices or converted."""
    tensors = []
    ends = [0, 0, 0]
    for number in range(draw(st.integers(0, 12))):
        shard, gap = draw(st.integers(0, 2)), draw(st.sampled_from([0, 0, 4, 12]))
        count = draw(st.one_of(st.integers(0, 40), st.integers(0, 2000)))
        begin = ends[shard] + gap
        dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.float16]))
        place = contiguous(begin, count)
        if world := draw(st.sampled_from([0, 0, 1, 2, 5])):
            rows, width = count // 20, world * draw(st.integers(1, 20 // world))
            place, count = sliced(begin, rows, width, world), rows * width
        ends[shard] = begin + 4 * count
        tensors.append(Wanted(f"t{number}", shard, place, dtype))
    names = [one.name for one in tensors]
    return tensors, draw(st.permutations(names))[: draw(st.integers(0, len(names)))] if names else []


def manifest_of(first_touch: list[str]) -> Manifest:
    """Return a manifest that has only the field that a layout reads."""
    return Manifest.model_construct(first_touch=tuple(first_touch))


@given(wanted(), st.integers(4, 3000))
def test_every_byte_is_copied_once_to_an_aligned_place_of_its_own(
    case: tuple[list[Wanted], list[str]], piece_bytes: int
) -> None:
    tensors, first_touch = case
    layout = SlabLayout(manifest_of(first_touch), tensors, piece_bytes)
    files = [torch.randint(0, 256, (100_000,), dtype=torch.uint8) for _ in range(3)]
    slab = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    raws = [torch.zeros(one.size_bytes, dtype=torch.uint8) for one in layout.raws]
    groups = {
        number: (group, at)
        for group, one in enumerate(layout.raws)
        for number, at in zip(one.tensors, one.offsets, strict=True)
    }
    assert all(len(one.tensors) == 1 for one in layout.raws if one.size_bytes > piece_bytes)
    copied = torch.zeros(layout.size_bytes, dtype=torch.int32)
    for piece in layout.pieces:
        assert 0 < piece.size_bytes <= piece_bytes
        buffer = torch.zeros(piece.size_bytes, dtype=torch.uint8)
        for segment in piece.segments:
            data, at = read(segment, files[segment.shard]), segment.at
            buffer[at : at + len(data)] = data
            if piece.raw == SLAB:
                copied[piece.begin + at : piece.begin + at + len(data)] += 1
        target = slab if piece.raw == SLAB else raws[piece.raw]
        target[piece.begin : piece.begin + piece.size_bytes] = buffer
    taken = torch.zeros(layout.size_bytes, dtype=torch.int32)
    for number, tensor in enumerate(tensors):
        offset, where = layout.offsets[number], tensor.place
        assert len(stored_bytes(where, files[tensor.shard])) == tensor.file_bytes
        assert offset % ALIGN_BYTES == 0
        taken[offset : offset + tensor.size_bytes] += 1
        stored = stored_bytes(where, files[tensor.shard])
        if tensor.plain:
            assert torch.equal(slab[offset : offset + tensor.size_bytes], stored)
            assert (copied[offset : offset + tensor.size_bytes] == 1).all()
        elif tensor.size_bytes:
            group, at = groups[number]
            assert at % ALIGN_BYTES == 0
            assert torch.equal(raws[group][at : at + len(stored)], stored)
            # The device writes the converted tensor there, so no piece may be copied to this place.
            assert not copied[offset : offset + tensor.size_bytes].any()
    assert taken.numel() == 0 or taken.max() <= 1


@given(wanted(), st.integers(4, 3000))
def test_the_pieces_of_a_tensor_are_found_and_come_in_the_order_of_first_touch(
    case: tuple[list[Wanted], list[str]], piece_bytes: int
) -> None:
    tensors, first_touch = case
    layout = SlabLayout(manifest_of(first_touch), tensors, piece_bytes)
    first: dict[str, int] = {}
    for number, tensor in enumerate(tensors):
        begin = layout.offsets[number]
        found = layout.covering(begin, begin + tensor.size_bytes)
        pieces = [layout.pieces[one] for one in found]
        if not tensor.size_bytes:
            continue
        first[tensor.name] = min(found)
        if tensor.plain:
            ranges = sorted((max(one.begin, begin), one.begin + one.size_bytes) for one in pieces)
            assert {one.raw for one in pieces} == {SLAB}
            assert ranges[0][0] == begin
            assert ranges[-1][1] >= begin + tensor.size_bytes
        else:
            (raw,) = {one.raw for one in pieces}
            assert number in layout.raws[raw].tensors
            assert sum(one.size_bytes for one in pieces) == layout.raws[raw].size_bytes
    for plain in (True, False):
        kind = {one.name for one in tensors if one.plain == plain}
        touched = [first[name] for name in first_touch if name in first and name in kind]
        assert touched == sorted(touched)


def test_many_small_tensors_are_one_copy_and_neighbours_one_segment() -> None:
    tensors = [Wanted(f"t{n}", 0, contiguous(256 * n, 64), torch.float32) for n in range(100)]
    (piece,) = SlabLayout(manifest_of([]), tensors).pieces
    assert piece.size_bytes == 25_600
    assert len(piece.segments) == 1
    # With 252 bytes each, the tensors are not aligned in the file, but they are in the slab. So each is a segment.
    tensors = [Wanted(f"t{n}", 0, contiguous(252 * n, 63), torch.float32) for n in range(100)]
    (piece,) = SlabLayout(manifest_of([]), tensors).pieces
    assert len(piece.segments) == 100


def test_many_small_tensors_that_are_converted_are_one_copy() -> None:
    tensors = [Wanted(f"t{n}", 0, contiguous(252 * n, 63), torch.bfloat16) for n in range(100)]
    layout = SlabLayout(manifest_of([]), tensors)
    (piece,) = layout.pieces
    assert (len(layout.raws), len(layout.spans), len(piece.segments)) == (1, 1, 100)
    # If a piece has exactly the size of all tensors, they are one piece. With one byte less, the last tensor is in a second group.
    layout = SlabLayout(manifest_of([]), tensors, 99 * 256 + 252)
    assert len(layout.pieces) == 1
    assert len(SlabLayout(manifest_of([]), tensors, 99 * 256 + 251).pieces) == 2

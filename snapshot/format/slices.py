"""Cuts tensors into slices, and finds the bytes and chunks of a snapshot that slices need. It never imports torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from typing import NamedTuple

from ...errors import SnapshotMismatch
from .dtypes import DTYPES
from .layout import some
from .manifest import Manifest, NeededPart, TensorEntry

Slices = Mapping[str, tuple[int, int, int]]
"""Maps patterns of tensors' names to (dim, rank, world). In a pattern, * stands for any characters. If several patterns
fit a name, the first one is used."""

_MAX_STRIDE = (1 << 63) - 1


class Slice(NamedTuple):
    """One of `world` equal slices of a tensor along dimension `dim`: number `rank`, counted from 0."""

    dim: int
    rank: int
    world: int


class Strided(NamedTuple):
    """Where in a shard the elements of a tensor or a slice are, with the shape and strides that torch gives them."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin_bytes: int
    end_bytes: int
    """The byte after the last element. The bytes up to it may include bytes of other slices, between the rows of this slice."""


def matching(pattern: str, names: Collection[str]) -> list[str]:
    """Return the names that fit a pattern or equal it. Raise SnapshotMismatch if there is no such name."""
    found = [name for name in names if name == pattern or fnmatchcase(name, pattern)]
    if not found:
        fault = f"No tensor of the snapshot has a name that fits {pattern[:80]!r}."
        remedy = f"Its names are such as {some(sorted(names), 3)}; * stands for any characters."
        raise SnapshotMismatch(fault, remedy=remedy)
    return found


def chosen(slices: Slices, names: Collection[str]) -> dict[str, Slice]:
    """Return the slice of each tensor in `names` that fits a pattern of `slices`. The other tensors are whole.

    Raise SnapshotMismatch if a pattern fits no name: it may have a typing error.
    """
    found: dict[str, Slice] = {}
    for pattern, (dim, rank, world) in slices.items():
        for name in matching(pattern, names):
            found.setdefault(name, Slice(dim, rank, world))
    return found


def named_entries(manifest: Manifest) -> dict[str, TensorEntry]:
    """Return all tensors by their names and aliases."""
    stored = {tensor.name: tensor for tensor in manifest.tensors}
    return stored | {alias: stored[target] for alias, target in manifest.aliases.items()}


def shape_fault(entry: TensorEntry) -> str | None:
    """Return why torch cannot have a tensor of this type and shape, or None if it can."""
    if DTYPES[entry.dtype].torch_shape(entry.shape) is None:
        return f"{entry.dtype} {list(entry.shape)}, whose rows do not fill whole bytes"
    # Count an empty dimension as 1: the other dimensions of an empty tensor may still be too large for torch.
    if prod(max(size, 1) for size in entry.shape) > _MAX_STRIDE:
        return f"{entry.dtype} {str(list(entry.shape))[:80]}, which is too large a shape for torch"
    return None


def slice_fault(entry: TensorEntry, cut: Slice) -> str | None:
    """Return why slice `cut` of a tensor cannot be made, or None if it can. The tensor has no `shape_fault`."""
    if DTYPES[entry.dtype].torch_name is None:
        return f"{entry.dtype} has no elements of whole bytes"
    shape = torch_shape(entry)
    if not 0 <= cut.rank < cut.world:
        return f"there is no slice {cut.rank} of {cut.world}"
    if not -len(shape) <= cut.dim < len(shape):
        return f"{list(shape)} has no dimension {cut.dim}"
    if shape[cut.dim] % cut.world:
        return f"{list(shape)} is not divisible by {cut.world} along dimension {cut.dim}"
    return None


def torch_shape(entry: TensorEntry) -> tuple[int, ...]:
    """Return the shape in torch of a tensor without a `shape_fault`."""
    return DTYPES[entry.dtype].torch_shape(entry.shape) or ()


def strided(entry: TensorEntry, cut: Slice | None = None) -> Strided:
    """Return the position of a tensor, or of a slice of it. The caller has checked `shape_fault` and `slice_fault`.

    A slice along dimension 0 is contiguous. A slice along another dimension has the strides of the whole tensor.
    """
    itemsize, whole = DTYPES[entry.dtype].torch_itemsize_bytes, torch_shape(entry)
    stride = contiguous_stride(whole)
    shape, first = list(whole), 0
    if cut is not None:
        shape[cut.dim] //= cut.world
        first = cut.rank * shape[cut.dim] * stride[cut.dim]
    reach = 0
    if all(shape):
        reach = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    begin_bytes = entry.offset_bytes + first * itemsize
    return Strided(tuple(shape), stride, begin_bytes, begin_bytes + reach * itemsize)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def part_of(manifest: Manifest, tensors: Sequence[str], slices: Slices) -> Manifest:
    """Return the manifest with a part. The part has only the chunks of these tensors or of their slices.

    `tensors` are patterns, like the keys of `slices`. Without `tensors`, all tensors are needed. Raise
    SnapshotMismatch if a pattern fits no name or a tensor cannot be cut.
    """
    entries = named_entries(manifest)
    cuts = chosen(slices, entries)
    names = dict.fromkeys(name for pattern in tensors for name in matching(pattern, entries)) or entries
    chunks: set[int] = set()
    for name in names:
        entry, cut = entries[name], cuts.get(name)
        if cut is not None and (fault := shape_fault(entry) or slice_fault(entry, cut)):
            raise SnapshotMismatch(f"Tensor {name!r} cannot be cut: {fault}.", remedy="Give another slice.")
        begin, end = entry.offset_bytes, entry.offset_bytes + entry.size_bytes
        if cut is not None:
            *_, begin, end = strided(entry, cut)
        chunks.update(manifest.chunks_of(entry.shard, begin, end))
    part = NeededPart(chunks=tuple(_ranges(sorted(chunks))), slices=dict(slices))
    return manifest.model_copy(update={"part": part})


def outside(manifest: Manifest, shard: int, begin: int, end: int) -> bool:
    """Return True if some of the bytes [begin, end) of a shard are not in the manifest's part."""
    if manifest.part is None or begin >= end:
        return False
    chunks = manifest.chunks_of(shard, begin, end)
    return not any(first <= chunks[0] and chunks[-1] <= last for first, last in manifest.part.chunks)


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges: pairs of the first number and the last."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found

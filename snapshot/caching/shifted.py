"""Guesses of which bytes of another snapshot a chunk is made, if the same tensors are at other offsets there.

A longer header, another tensor or other shards move what follows, so that no chunk has the digest of an earlier one
though the tensors are the same. A guess takes the tensors of the same name, dtype and shape. Only the digest of the
chunk shows whether it is right.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import NamedTuple

from ..fetching.ranges import Chunks, Range
from ..format.manifest import Manifest, TensorEntry


class TensorPlace(NamedTuple):
    """Where a tensor is in a snapshot: from byte `offset` on in shard number `shard`."""

    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int


def guesses(
    manifest: Manifest, chunks: Iterable[int], tensors: Mapping[str, TensorPlace]
) -> dict[int, list[Range]]:
    """Return the ranges of another snapshot, which has `tensors`, of which each chunk is made one after the other.

    Chunks with bytes of a header, or of tensors that are not there, are left out.
    """
    by_shard: list[list[TensorEntry]] = [[] for _ in manifest.shards]
    for tensor in manifest.tensors:
        if tensor.size_bytes:
            by_shard[tensor.shard].append(tensor)
    for entries in by_shard:
        entries.sort(key=attrgetter("offset_bytes"))
    numbered, found = Chunks(manifest), {}
    for chunk in chunks:
        extent = numbered.extent(chunk)
        if ranges := _ranges(extent, by_shard[extent.shard], tensors):
            found[chunk] = ranges
    return found


def _ranges(
    extent: Range, entries: list[TensorEntry], tensors: Mapping[str, TensorPlace]
) -> list[Range] | None:
    """Return the ranges for the bytes of `extent`, None if there is a byte for which there is none."""
    ranges: list[Range] = []
    index = bisect_right(entries, extent.begin, key=attrgetter("offset_bytes")) - 1
    at = extent.begin
    while at < extent.end:
        tensor = entries[index] if 0 <= index < len(entries) else None
        there = tensors.get(tensor.name) if tensor is not None else None
        if tensor is None or there is None or (there.dtype, there.shape) != (tensor.dtype, tensor.shape):
            return None
        skipped, end = at - tensor.offset_bytes, min(extent.end, tensor.offset_bytes + tensor.size_bytes)
        if skipped < 0 or end <= at:
            return None
        begin = there.offset + skipped
        if ranges and (ranges[-1].shard, ranges[-1].end) == (there.shard, begin):
            ranges[-1].end += end - at
        else:
            ranges.append(Range(there.shard, begin, begin + end - at))
        at, index = end, index + 1
    return ranges

"""Lays the weights of a plan out in one slab of device memory, and divides the bytes to copy into pieces.

In the slab, every tensor begins at a multiple of ALIGN_BYTES, as torch's allocator would place it, because fast kernels
want that alignment. In a file, tensors are only aligned for their elements. So a piece is assembled from segments of
the files, in a buffer of the host. One copy moves the whole piece to the device, however many tensors it has.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from ...format.manifest import Manifest
from ..place import Elements

ALIGN_BYTES = 256
PIECE_BYTES = 32 << 20
"""Pieces are large and few, because submitting a small piece takes the interpreter as long as submitting a large piece."""
SLAB = -1


class Wanted(NamedTuple):
    """A tensor to copy to the device, from the elements at `place` in shard `shard`. On the device, the tensor has `dtype`."""

    name: str
    shard: int
    place: Elements
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The size on the device, where the tensor is contiguous."""
        return prod(self.place.shape) * self.dtype.itemsize

    @property
    def file_bytes(self) -> int:
        """The size of the tensor's elements in the file. For a slice, this leaves out the bytes between its runs."""
        return prod(self.place.shape) * self.place.dtype.itemsize

    @property
    def plain(self) -> bool:
        """True if the device converts nothing: the tensor has the dtype of the file."""
        return self.place.dtype == self.dtype

    @property
    def runs(self) -> tuple[int, int]:
        """The length of a run, which is contiguous in the file, and the distance from one run to the next run.

        All distances are equal, since a slice is along one dimension. A tensor that is not a slice is one run.
        """
        run, itemsize = 1, self.place.dtype.itemsize
        for size, step in zip(reversed(self.place.shape), reversed(self.place.stride), strict=True):
            if size > 1 and step != run:
                return run * itemsize, step * itemsize
            run *= size
        return run * itemsize, run * itemsize

    def segments(self, begin: int, end: int, at: int) -> Iterator[Segment]:
        """Yield the segments of the shard that have bytes [begin, end) of the tensor, counted without the gaps between runs.

        `at` is the offset of the first segment in the piece.
        """
        run, step = self.runs
        while begin < end:
            number, inside = divmod(begin, run)
            first = self.place.begin_bytes + number * step + inside
            count = 0 if inside else (end - begin) // run
            if count < 2:
                taken = min(end - begin, run - inside)
                yield Segment(self.shard, first, first + taken, at)
            else:
                taken = count * run
                yield Segment(self.shard, first, first + (count - 1) * step + run, at, run, step)
            begin, at = begin + taken, at + taken


class Segment(NamedTuple):
    """Bytes [begin, end) of a shard, and their offset in the piece.

    If `step` is not 0, the segment has only the first `run` bytes of each `step` bytes.
    """

    shard: int
    begin: int
    end: int
    at: int
    run: int = 0
    step: int = 0

    @property
    def runs(self) -> int:
        """The number of runs in this segment."""
        return (self.end - self.begin - self.run) // self.step + 1 if self.step else 1


@dataclass(frozen=True, slots=True)
class SlabPiece:
    """The bytes of one copy, at most PIECE_BYTES, and their offset `begin` in the slab.

    If `raw` is not SLAB, it is the number of a group in `SlabLayout.raws`, and `begin` is the offset in the group's raw
    bytes.
    """

    raw: int
    begin: int
    size_bytes: int
    segments: tuple[Segment, ...]


class RawGroup(NamedTuple):
    """Tensors that are not plain. Their raw bytes, as in the files, are copied to the device and converted there."""

    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    """The offset of each tensor in the raw bytes."""
    size_bytes: int
    """At most the size of a piece, unless the group is one larger tensor."""


class Span(NamedTuple):
    """Bytes [begin, end) of the slab, and the numbers of the pieces that fill them: one, or all pieces of a group."""

    begin: int
    end: int
    pieces: tuple[int, ...]


class SlabLayout:
    """The offset of each tensor in the slab, and the pieces to copy.

    The pieces are in the order in which a forward pass first needs their tensors, if the manifest has recorded it. In the
    slab, tensors that are not plain come after all plain tensors.
    """

    def __init__(self, manifest: Manifest, tensors: Sequence[Wanted], piece_bytes: int = PIECE_BYTES) -> None:
        self.tensors = tuple(tensors)
        self.offsets = [0] * len(tensors)
        """The offset of each tensor in the slab. 0 if the tensor is empty."""
        self.size_bytes = 0
        rank = {name: number for number, name in enumerate(manifest.first_touch)}
        order = sorted(
            (number for number, one in enumerate(tensors) if one.size_bytes),
            key=lambda number: (
                rank.get(tensors[number].name, len(rank)),
                tensors[number].shard,
                tensors[number].place.begin_bytes,
            ),
        )
        # Put tensors that are not plain after all plain tensors, so that no piece of the slab covers their bytes.
        plain = [number for number in order if tensors[number].plain]
        other = [number for number in order if not tensors[number].plain]
        for number in (*plain, *other):
            self.offsets[number] = self.size_bytes = -(-self.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
            self.size_bytes += tensors[number].size_bytes
        # Round the size up, so that the whole slab can be viewed as elements of any type.
        self.size_bytes = -(-self.size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.raws = tuple(self._raw_groups(other, piece_bytes))
        ranked = [*self._plain_pieces(plain, piece_bytes), *self._raw_pieces(piece_bytes)]
        position = {number: index for index, number in enumerate(order)}
        ranked.sort(key=lambda one: position[one[0]])
        self.pieces = tuple(piece for _, piece in ranked)
        self.largest_bytes = max((piece.size_bytes for piece in self.pieces), default=0)
        self.spans = tuple(sorted(self._covered()))
        self._begins = [span.begin for span in self.spans]

    def _plain_pieces(self, numbers: Sequence[int], piece_bytes: int) -> Iterator[tuple[int, SlabPiece]]:
        """Yield the pieces for plain tensors, each with the number of its first tensor."""
        first, begin, end, segments = -1, 0, 0, list[Segment]()
        for number in numbers:
            tensor, offset, done = self.tensors[number], self.offsets[number], 0
            while done < tensor.size_bytes:
                if segments and offset - begin >= piece_bytes:
                    yield first, SlabPiece(SLAB, begin, end - begin, tuple(segments))
                    segments = []
                if not segments:
                    first, begin = number, offset
                taken = min(tensor.size_bytes - done, begin + piece_bytes - offset)
                _extend(segments, tensor.segments(done, done + taken, offset - begin))
                done, offset = done + taken, offset + taken
                end = offset
        if segments:
            yield first, SlabPiece(SLAB, begin, end - begin, tuple(segments))

    def _raw_groups(self, numbers: Sequence[int], piece_bytes: int) -> Iterator[RawGroup]:
        tensors, offsets, size_bytes = list[int](), list[int](), 0
        for number in numbers:
            at, length = -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES, self.tensors[number].file_bytes
            if tensors and at + length > piece_bytes:
                yield RawGroup(tuple(tensors), tuple(offsets), size_bytes)
                tensors, offsets, at = [], [], 0
            tensors.append(number)
            offsets.append(at)
            size_bytes = at + length
        if tensors:
            yield RawGroup(tuple(tensors), tuple(offsets), size_bytes)

    def _raw_pieces(self, piece_bytes: int) -> Iterator[tuple[int, SlabPiece]]:
        for number, group in enumerate(self.raws):
            # A group of several tensors is one piece, so for such a group, this loop runs once.
            for begin in range(0, group.size_bytes, piece_bytes):
                end, segments = min(begin + piece_bytes, group.size_bytes), list[Segment]()
                for one, at in zip(group.tensors, group.offsets, strict=True):
                    tensor = self.tensors[one]
                    _extend(segments, tensor.segments(begin, min(end, tensor.file_bytes), at))
                yield group.tensors[0], SlabPiece(number, begin, end - begin, tuple(segments))

    def _covered(self) -> Iterator[Span]:
        raws: dict[int, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            if piece.raw == SLAB:
                yield Span(piece.begin, piece.begin + piece.size_bytes, (number,))
            else:
                raws.setdefault(piece.raw, []).append(number)
        for raw, numbers in raws.items():
            # The tensors of a group follow each other in the slab too, so one span covers the group.
            first, last = self.raws[raw].tensors[0], self.raws[raw].tensors[-1]
            end = self.offsets[last] + self.tensors[last].size_bytes
            yield Span(self.offsets[first], end, tuple(numbers))

    def placed(self) -> list[tuple[int, int, int, str]]:
        """Return the extent and the name of each tensor that is not empty (see `touch.Placed`). The slab is region 0."""
        pairs = zip(self.tensors, self.offsets, strict=True)
        return [(0, at, at + one.size_bytes, one.name) for one, at in pairs if one.size_bytes]

    def covering(self, begin: int, end: int) -> list[int]:
        """Return the numbers of the pieces that fill bytes [begin, end) of the slab."""
        found: list[int] = []
        at = max(0, bisect_right(self._begins, begin) - 1)
        for low, high, numbers in self.spans[at:]:
            if low >= end:
                break
            if high > begin:
                found += numbers
        return found


def _extend(segments: list[Segment], added: Iterable[Segment]) -> None:
    """Append segments. If a segment continues the last one both in the file and in the piece, merge the two."""
    for new in added:
        last = segments[-1] if segments and not (segments[-1].step or new.step) else None
        ends = last and (last.shard, last.end, last.at + last.end - last.begin)
        if last is not None and ends == (new.shard, new.begin, new.at):
            segments[-1] = last._replace(end=new.end)
        else:
            segments.append(new)

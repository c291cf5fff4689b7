"""The byte ranges of a fetch: which are still wanted, in what order, and which a connection is reading.

Pure bookkeeping, without threads or a clock. Every byte is in exactly one place: in a waiting range, in one
part that a connection is reading, or done. So bytes can be counted, and no two connections write the same
ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ..format.manifest import Manifest


@dataclass(slots=True)
class Range:
    """Bytes [begin, end) of one shard. `attempts` failed in a row; not to be tried again before `due_s`."""

    shard: int
    begin: int
    end: int
    attempts: int = 0
    due_s: float = 0.0


@dataclass(slots=True, eq=False)
class Part:
    """A range that one connection is reading. `at` is how far it got; `end` may be lowered meanwhile."""

    shard: int
    at: int
    end: int
    attempts: int = 0
    asked_s: float = 0.0
    """When it was requested; from the first byte on, when the last bytes came."""
    started: bool = False
    broken_off: bool = False


class Chunks:
    """The chunks of a snapshot, numbered through all shards."""

    def __init__(self, manifest: Manifest) -> None:
        self._chunk_bytes = manifest.chunk_bytes
        self._sizes = [shard.size_bytes for shard in manifest.shards]
        self._shards = manifest.shards
        self._first = (0, *accumulate(len(shard.chunks) for shard in manifest.shards))
        self.count = self._first[-1]

    @cached_property
    def digests(self) -> list[str]:
        return [digest for shard in self._shards for digest in shard.chunks]

    def extent(self, chunk: int) -> Range:
        """The bytes of chunk number `chunk`."""
        shard = bisect_right(self._first, chunk) - 1
        begin = (chunk - self._first[shard]) * self._chunk_bytes
        return Range(shard, begin, min(begin + self._chunk_bytes, self._sizes[shard]))

    def at(self, shard: int, offset: int) -> int:
        """The number of the chunk that holds byte `offset` of a shard."""
        return self._first[shard] + offset // self._chunk_bytes

    def covering(self, shard: int, begin: int, end: int) -> tuple[int, int]:
        """The numbers of the first and the last chunk of bytes [begin, end) of a shard; `begin` < `end`."""
        return self.at(shard, begin), self.at(shard, end - 1)


class Ranges:
    """The waiting ranges, the most wanted first."""

    def __init__(self, manifest: Manifest, missing: Iterable[int]) -> None:
        """`missing` are the numbers of the chunks to fetch, the most wanted first."""
        self._chunks = Chunks(manifest)
        self._chunk_bytes = manifest.chunk_bytes
        self._waiting: list[Range] = []
        self.active: list[Part] = []
        for extent in map(self._chunks.extent, missing):
            last = self._waiting[-1] if self._waiting else None
            if last is not None and (last.shard, last.end) == (extent.shard, extent.begin):
                last.end = extent.end
            else:
                self._waiting.append(extent)

    @property
    def waiting_bytes(self) -> int:
        return sum(item.end - item.begin for item in self._waiting)

    @property
    def idle(self) -> bool:
        """True if nothing waits and nothing is being read."""
        return not self._waiting and not self.active

    def take(self, limit_bytes: int, now_s: float) -> Part | None:
        """Take the most wanted due range, at most `limit_bytes` of it, cut between chunks where possible."""
        for index, item in enumerate(self._waiting):
            if item.due_s > now_s:
                continue
            end = item.end
            if end - item.begin > limit_bytes:
                end = (item.begin + limit_bytes) // self._chunk_bytes * self._chunk_bytes
                if end <= item.begin:
                    end = item.begin + limit_bytes
            part = Part(item.shard, item.begin, end, item.attempts)
            if end == item.end:
                del self._waiting[index]
            else:
                item.begin, item.attempts = end, 0
            self.active.append(part)
            return part
        return None

    def next_due_s(self) -> float | None:
        """When the first of the waiting ranges is due; None if nothing waits."""
        return min((item.due_s for item in self._waiting), default=None)

    def finish(self, part: Part, *, attempts: int = 0, due_s: float = 0.0) -> None:
        """End the reading of `part`. What is left of it waits again, before everything else."""
        self.active.remove(part)
        if part.at < part.end:
            self._waiting.insert(0, Range(part.shard, part.at, part.end, attempts, due_s))

    def again(self, chunk: int) -> None:
        """Fetch `chunk` once more, next."""
        self._waiting.insert(0, self._chunks.extent(chunk))

    def split(self, least_bytes: int, margin_bytes: int) -> Part | None:
        """Take over half of what is left of the longest part, if that is at least `least_bytes`.

        The `margin_bytes` that its connection may be in the middle of reading stay with it.
        """
        longest = max(self.active, key=lambda part: part.end - part.at, default=None)
        if longest is None or longest.broken_off or longest.end - longest.at < 2 * least_bytes + margin_bytes:
            return None
        middle = (longest.at + margin_bytes + longest.end) // 2
        aligned = middle // self._chunk_bytes * self._chunk_bytes
        cut = aligned if aligned >= longest.at + margin_bytes + least_bytes else middle
        # Cut first, check afterwards: the other thread keeps reading, and stops at the cut from here on.
        end, longest.end = longest.end, cut
        if longest.at + margin_bytes > cut:
            longest.end = end
            return None
        half = Part(longest.shard, cut, end)
        self.active.append(half)
        return half

    def demand(self, first: int, last: int) -> None:
        """Move what waits of chunks [first, last] to the front."""
        low, high = self._chunks.extent(first), self._chunks.extent(last)
        wanted: list[Range] = []
        others: list[Range] = []
        for item in self._waiting:
            # Places are ordered by shard, then by byte.
            begin = max((item.shard, item.begin), (low.shard, low.begin))
            end = min((item.shard, item.end), (high.shard, high.end))
            if begin >= end:
                others.append(item)
                continue
            wanted.append(replace(item, begin=begin[1], end=end[1]))
            rest = ((item.begin, begin[1]), (end[1], item.end))
            others += [replace(item, begin=left, end=right) for left, right in rest if left < right]
        self._waiting = wanted + others


def wanted_order(manifest: Manifest) -> list[int]:
    """The numbers of all chunks: in the order of first touch where that was recorded, then in file order."""
    chunks = Chunks(manifest)
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    order: dict[int, None] = {}
    for name in manifest.first_touch:
        tensor = tensors[name]
        if tensor.size_bytes:
            end = tensor.offset_bytes + tensor.size_bytes
            first, last = chunks.covering(tensor.shard, tensor.offset_bytes, end)
            order.update(dict.fromkeys(range(first, last + 1)))
    order.update(dict.fromkeys(range(chunks.count)))
    return list(order)

"""Keeps account of the byte ranges of a fetch: the waiting ranges in their order, and the parts that are being read.

It uses no threads, locks or clock: callers hold a lock, and pass the time. Every byte is in exactly one state: in a
waiting range, in one part that a connection is reading, or done. So no two connections write the same bytes, and the
bytes in each state can be counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ..format.manifest import UNKNOWN_DIGEST, Manifest


@dataclass(slots=True)
class Range:
    """Bytes [begin, end) of one shard that must be fetched.

    The last `attempts` attempts failed. The next attempt must not start before the time `due_s`.
    """

    shard: int
    begin: int
    end: int
    attempts: int = 0
    due_s: float = 0.0


@dataclass(slots=True, eq=False)
class Part:
    """Bytes of a shard that one connection is reading. Bytes before `at` are done, bytes [at, end) are not.

    Another thread may lower `end` during the read (see Ranges.split). `attempts` counts the failures in a row.
    """

    shard: int
    at: int
    end: int
    attempts: int = 0
    asked_s: float = 0.0
    """The time of the request or, after the answer has begun, the time when bytes were last received."""
    asked_end: int = 0
    """The value of `end` at the time of the request."""
    # True once the source has answered the request.
    started: bool = False
    # True if the supervisor closed the connection because it received nothing for too long.
    broken_off: bool = False


class Chunks:
    """The chunks of a snapshot, numbered from 0 through all shards in the manifest's order."""

    def __init__(self, manifest: Manifest) -> None:
        self._chunk_bytes = manifest.chunk_bytes
        self._sizes = [shard.size_bytes for shard in manifest.shards]
        self._shards = manifest.shards
        self._first = (0, *accumulate(len(shard.chunks) for shard in manifest.shards))
        self.count = self._first[-1]
        self._learning = manifest.observed is not None
        self._part = manifest.part

    def needed(self) -> Collection[int]:
        """Return the numbers of the chunks that are fetched, in their order: all chunks, or the chunks of the part."""
        if self._part is None:
            return range(self.count)
        return {chunk: None for first, last in self._part.chunks for chunk in range(first, last + 1)}.keys()

    @cached_property
    def digests(self) -> list[str]:
        """The digests of all chunks. If the manifest lacks a digest, it is UNKNOWN_DIGEST until `accept` sets it."""
        return [digest for shard in self._shards for digest in shard.chunks]

    def accept(self, chunk: int, digest: str) -> bool:
        """Return True if `digest` is the digest of `chunk`. If the digest of `chunk` is not known yet, record `digest`."""
        if self._learning and self.digests[chunk] == UNKNOWN_DIGEST:
            self.digests[chunk] = digest
        return self.digests[chunk] == digest

    def extent(self, chunk: int) -> Range:
        """Return the bytes of chunk number `chunk`."""
        shard = bisect_right(self._first, chunk) - 1
        begin = (chunk - self._first[shard]) * self._chunk_bytes
        return Range(shard, begin, min(begin + self._chunk_bytes, self._sizes[shard]))

    def at(self, shard: int, offset: int) -> int:
        """Return the number of the chunk with byte `offset` of shard number `shard`."""
        return self._first[shard] + offset // self._chunk_bytes

    def of_shard(self, shard: int) -> range:
        """Return the numbers of the chunks of shard number `shard`."""
        return range(self._first[shard], self._first[shard + 1])

    def covering(self, shard: int, begin: int, end: int) -> tuple[int, int]:
        """Return the first and the last chunk with bytes [begin, end) of a shard. The range must not be empty."""
        return self.at(shard, begin), self.at(shard, end - 1)


class Ranges:
    """The waiting ranges, in the order in which they will be fetched, and the parts that are being read."""

    def __init__(self, manifest: Manifest, missing: Iterable[int]) -> None:
        """`missing` are the numbers of the chunks to fetch, in the order in which they are wanted."""
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
        """True if no range waits and no part is being read."""
        return not self._waiting and not self.active

    def take(self, limit_bytes: int, now_s: float) -> Part | None:
        """Return the next part to read, from the first range that is due at `now_s`. None if no range is due.

        If the range is larger than `limit_bytes`, cut it, between chunks if possible. The rest keeps waiting.
        """
        item = next((item for item in self._waiting if item.due_s <= now_s), None)
        if item is None:
            return None
        end = item.end
        if end - item.begin > limit_bytes:
            end = (item.begin + limit_bytes) // self._chunk_bytes * self._chunk_bytes
            if end <= item.begin:
                end = item.begin + limit_bytes
        part = Part(item.shard, item.begin, end, item.attempts)
        if end == item.end:
            self._waiting.remove(item)
        else:
            item.begin, item.attempts = end, 0
        self.active.append(part)
        return part

    def next_due_s(self) -> float | None:
        """Return the earliest time at which a waiting range is due. None if no range waits."""
        return min((item.due_s for item in self._waiting), default=None)

    def finish(self, part: Part, *, attempts: int = 0, due_s: float = 0.0) -> None:
        """Record that `part` is no longer read. Its unread bytes, if any, become the first waiting range."""
        self.active.remove(part)
        if part.at < part.end:
            self._waiting.insert(0, Range(part.shard, part.at, part.end, attempts, due_s))

    def again(self, chunk: int) -> None:
        """Make the whole `chunk` the first waiting range, so that it is fetched again."""
        self._waiting.insert(0, self._chunks.extent(chunk))

    def split(self, least_bytes: int, margin_bytes: int) -> Part | None:
        """Cut the part with the most unread bytes in two. Return its second half as a new part.

        The connection of the part may be reading its next `margin_bytes` now. So these bytes stay with the first half, and do
        not count for the size of the halves. Return None if no part is being read, if the connection of that part was closed,
        or if a half would be smaller than `least_bytes`.
        """
        longest = max(self.active, key=lambda part: part.end - part.at, default=None)
        if longest is None or longest.broken_off or longest.end - longest.at < 2 * least_bytes + margin_bytes:
            return None
        middle = (longest.at + margin_bytes + longest.end) // 2
        aligned = middle // self._chunk_bytes * self._chunk_bytes
        cut = aligned if aligned >= longest.at + margin_bytes + least_bytes else middle
        # Set the new end before checking `at`: the other thread continues to read, but it now stops at the cut. If that
        # thread has come too close to the cut meanwhile, restore the old end.
        end, longest.end = longest.end, cut
        if longest.at + margin_bytes > cut:
            longest.end = end
            return None
        half = Part(longest.shard, cut, end)
        self.active.append(half)
        return half

    def demand(self, first: int, last: int) -> None:
        """Move the waiting bytes of chunks `first` to `last`, both included, to the front."""
        low, high = self._chunks.extent(first), self._chunks.extent(last)
        wanted: list[Range] = []
        others: list[Range] = []
        for item in self._waiting:
            # Compare positions as pairs of shard and byte.
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
    """Return the numbers of the chunks to fetch. Chunks in the recorded order of first touch come before all others."""
    chunks = Chunks(manifest)
    tensors = {tensor.name: tensor for tensor in manifest.tensors}
    order: dict[int, None] = {}
    for name in manifest.first_touch:
        tensor = tensors[name]
        if tensor.size_bytes:
            end = tensor.offset_bytes + tensor.size_bytes
            first, last = chunks.covering(tensor.shard, tensor.offset_bytes, end)
            order.update(dict.fromkeys(range(first, last + 1)))
    needed = chunks.needed()
    order.update(dict.fromkeys(needed))
    return [chunk for chunk in order if chunk in needed]

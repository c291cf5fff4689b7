"""Ranges: what is still to be fetched, in what order, and who fetches it. Pure bookkeeping: no threads, no clock.

Every byte is in exactly one place: waiting here, in one part that a connection is fetching, or done with. So bytes can
be counted, and no two connections ever write the same ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from ..format.manifest import Manifest


@dataclass(slots=True)
class Range:
    """Bytes [begin, end) of one shard. `attempts` failed in a row before; not to be tried again before `due_s`."""

    shard: int
    begin: int
    end: int
    attempts: int = 0
    due_s: float = 0.0


@dataclass(slots=True, eq=False)
class Part:
    """A range that one connection is fetching. `at` is how far it got; `end` may come nearer while it is read."""

    shard: int
    begin: int
    end: int
    attempts: int
    at: int = field(init=False)
    asked_s: float = 0.0
    """When it was asked for, until the first byte; then when the last bytes came."""
    started: bool = False
    broken_off: bool = False

    def __post_init__(self) -> None:
        self.at = self.begin


class Ranges:
    """The waiting ranges, the most wanted first."""

    def __init__(self, manifest: Manifest, missing: Iterable[int]) -> None:
        """`missing` are chunks, counted through all shards, in the order in which they are wanted."""
        self._chunk_bytes = manifest.chunk_bytes
        self._sizes = [shard.size_bytes for shard in manifest.shards]
        self._first = (0, *accumulate(len(shard.chunks) for shard in manifest.shards))
        self._waiting: list[Range] = []
        self.active: list[Part] = []
        for chunk in missing:
            self._append(self.extent(chunk))

    def extent(self, chunk: int) -> Range:
        """The bytes of chunk `chunk`, counted through all shards."""
        shard = bisect_right(self._first, chunk) - 1
        begin = (chunk - self._first[shard]) * self._chunk_bytes
        return Range(shard, begin, min(begin + self._chunk_bytes, self._sizes[shard]))

    def chunk_at(self, shard: int, offset: int) -> int:
        return self._first[shard] + offset // self._chunk_bytes

    @property
    def waiting_bytes(self) -> int:
        return sum(item.end - item.begin for item in self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is being fetched."""
        return not self._waiting and not self.active

    def take(self, limit_bytes: int, now_s: float) -> Part | None:
        """The most wanted range that is due, `limit_bytes` of it at most, cut between chunks where it can be."""
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
        """`part` is no longer being fetched; what is left of it waits again, before everything else."""
        self.active.remove(part)
        if part.at < part.end:
            self._waiting.insert(0, Range(part.shard, part.at, part.end, attempts, due_s))

    def again(self, chunk: int) -> None:
        """Fetch `chunk` once more, next."""
        self._waiting.insert(0, self.extent(chunk))

    def split(self, least_bytes: int, margin_bytes: int) -> Part | None:
        """Take over the second half of the part that has most before it, if that is at least `least_bytes`.

        Its connection may be in the middle of a read of up to `margin_bytes`, which stays its own.
        """
        longest = max(self.active, key=lambda part: part.end - part.at, default=None)
        if longest is None or longest.broken_off or longest.end - longest.at < 2 * least_bytes + margin_bytes:
            return None
        middle = longest.at + margin_bytes + (longest.end - longest.at - margin_bytes) // 2
        aligned = middle // self._chunk_bytes * self._chunk_bytes
        cut = aligned if aligned >= longest.at + margin_bytes + least_bytes else middle
        # The cut first, then a look: its reader goes on meanwhile, and from here on stops at the cut.
        end, longest.end = longest.end, cut
        if longest.at + margin_bytes > cut:
            longest.end = end
            return None
        half = Part(longest.shard, cut, end, 0)
        self.active.append(half)
        return half

    def demand(self, first: int, last: int) -> None:
        """Somebody waits for chunks [first, last]: they go first."""
        wanted: list[Range] = []
        others: list[Range] = []
        asked = [self.extent(chunk) for chunk in range(first, last + 1)]
        hull: dict[int, tuple[int, int]] = {}
        for item in asked:
            begin, end = hull.get(item.shard, (item.begin, item.end))
            hull[item.shard] = (min(begin, item.begin), max(end, item.end))
        for item in self._waiting:
            begin, end = hull.get(item.shard, (0, 0))
            _cut(item, begin, end, wanted.append, others.append)
        self._waiting = wanted + others

    def _append(self, item: Range) -> None:
        last = self._waiting[-1] if self._waiting else None
        if last is not None and last.shard == item.shard and last.end == item.begin:
            last.end = item.end
        else:
            self._waiting.append(item)


def wanted_order(manifest: Manifest) -> list[int]:
    """All chunks, counted through all shards: by first touch where it was recorded, the others as they lie."""
    first = (0, *accumulate(len(shard.chunks) for shard in manifest.shards))
    places = {tensor.name: tensor for tensor in manifest.tensors}
    order: dict[int, None] = {}
    for name in manifest.first_touch:
        tensor = places[name]
        if tensor.size_bytes:
            begin = tensor.offset_bytes // manifest.chunk_bytes
            end = (tensor.offset_bytes + tensor.size_bytes - 1) // manifest.chunk_bytes
            order.update(dict.fromkeys(range(first[tensor.shard] + begin, first[tensor.shard] + end + 1)))
    order.update(dict.fromkeys(range(first[-1])))
    return list(order)


def _cut(
    item: Range, begin: int, end: int, inside: Callable[[Range], None], outside: Callable[[Range], None]
) -> None:
    """Give the piece of `item` within [begin, end) to `inside`, the rest to `outside`."""
    low, high = max(item.begin, begin), min(item.end, end)
    if low >= high:
        outside(item)
        return
    inside(Range(item.shard, low, high, item.attempts, item.due_s))
    for left, right in ((item.begin, low), (high, item.end)):
        if left < right:
            outside(Range(item.shard, left, right, item.attempts, item.due_s))

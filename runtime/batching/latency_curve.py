"""The latency curve L(n): how long a group of n takes on this revision's workers, learned from those that ran."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Of each size so many of the last durations count: a percentile of them follows a machine that becomes slower.
KEPT = 64
# One in so many observations makes the curve be drawn again, but each of the first ones does.
REDRAWN_EVERY = 16
# What was measured before a start counts as so many durations; after so many new ones it is forgotten.
TRUSTED = 32
SMOOTHING = 0.1
MIN_COST = 1e-6
P50, P95 = 0.5, 0.95


class Point(NamedTuple):
    """A size, and how many seconds groups of about that size took: the median and the 95th percentile."""

    size: float
    p50_s: float
    p95_s: float


class LatencyCurve:
    """Durations by size. Sizes lie in buckets half an octave wide; between their points the curve is straight."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        """`points` were measured before: they count until newer durations of their size have replaced them."""
        self.unit = 1.0
        """The mean cost of an item: where the handler counts tokens, say, a group of three is of size 3 x unit."""
        self._buckets: dict[int, _Bucket] = {}
        self._points: tuple[Point, ...] = ()
        self._sizes: list[float] = []
        self._fresh = 0
        self.recall(points)

    def recall(self, points: Iterable[Point]) -> None:
        """Takes points that were measured elsewhere, as of a worker before it is ready."""
        for point in points:
            self._bucket(point.size).recall(point)
        self._draw()

    @property
    def known(self) -> bool:
        return bool(self._points)

    @property
    def points(self) -> tuple[Point, ...]:
        """The curve as it is drawn now: sizes ascend, and no larger size is faster than a smaller one."""
        return self._points

    def observe(self, count: int, cost: float, seconds: float) -> None:
        """A group of `count` items, of `cost` together, took so long."""
        self.unit += SMOOTHING * (cost / count - self.unit)
        size = max(cost, MIN_COST)
        bucket = self._bucket(size)
        bucket.add(size, seconds)
        self._fresh += 1
        if self._fresh >= REDRAWN_EVERY or bucket.count < REDRAWN_EVERY:
            self._draw()

    def typical(self, count: float) -> float:
        """Seconds that half of the groups of so many items take at most; 0 while nothing is known."""
        return self._at(count * self.unit, 1)

    def bound(self, count: float) -> float:
        """Seconds that 95 % of the groups of so many items take at most; 0 while nothing is known."""
        return self._at(count * self.unit, 2)

    def _bucket(self, size: float) -> _Bucket:
        number = round(2 * math.log2(max(size, MIN_COST)))
        found = self._buckets.get(number)
        if found is None:
            found = self._buckets[number] = _Bucket()
        return found

    def _draw(self) -> None:
        self._fresh = 0
        found = [self._buckets[number].point() for number in sorted(self._buckets)]
        weights = [self._buckets[number].weight for number in sorted(self._buckets)]
        p50s = isotonic([(point.p50_s, weight) for point, weight in zip(found, weights, strict=True)])
        p95s = isotonic([(point.p95_s, weight) for point, weight in zip(found, weights, strict=True)])
        self._points = tuple(
            Point(point.size, p50, max(p50, p95)) for point, p50, p95 in zip(found, p50s, p95s, strict=True)
        )
        self._sizes = [point.size for point in found]

    def _at(self, size: float, field: int) -> float:
        points = self._points
        if not points:
            return 0.0
        if size <= points[0].size or len(points) == 1:
            # Of one point alone nobody knows a slope: what is not known is held against no caller.
            return points[0][field]
        if size <= points[-1].size:
            right = bisect_left(self._sizes, size)
            return _between(points[right - 1], points[right], size, field)
        # Beyond the last: on along the chord of the whole curve, which one odd point does not tilt.
        first, last = points[0], points[-1]
        return max(last[field], _between(first, last, size, field))


def _between(left: Point, right: Point, size: float, field: int) -> float:
    share = (size - left.size) / max(right.size - left.size, 1e-9)
    return left[field] + share * (right[field] - left[field])


def isotonic(weighted: Sequence[tuple[float, float]]) -> list[float]:
    """The non-decreasing sequence nearest to these values by weighted distances (pool adjacent violators).

    Distances, not their squares: a pool becomes its median, so that one odd value does not tilt its neighbours.
    """
    pools: list[list[tuple[float, float]]] = []
    for pair in weighted:
        pools.append([pair])
        while len(pools) > 1 and _median(pools[-2]) > _median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [level for pool in pools for level in [_median(pool)] * len(pool)]


def _median(pool: list[tuple[float, float]]) -> float:
    """The least value that half of the weight does not exceed."""
    if len(pool) == 1:
        return pool[0][0]
    half, below = sum(weight for _, weight in pool) / 2, 0.0
    for value, weight in sorted(pool):
        below += weight
        if below >= half:
            return value
    raise AssertionError("a pool has a weight")


class _Bucket:
    """The last durations of groups of about one size."""

    __slots__ = ("_last", "_recalled", "_size", "count")

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=KEPT)
        self._recalled: Point | None = None
        self._size = 0.0
        self.count = 0

    def recall(self, point: Point) -> None:
        self._recalled = point

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        self._size += (size - self._size) / min(self.count, KEPT)
        self._last.append(seconds)

    @property
    def weight(self) -> float:
        """How much is known of it."""
        return max(len(self._last), TRUSTED if self._recalled is not None else 0)

    def point(self) -> Point:
        known, recalled = list(self._last), self._recalled
        if recalled is None or len(known) >= TRUSTED:
            return Point(self._size, _percentile(known, P50), _percentile(known, P95))
        # What was measured before stands for those that have not run yet.
        rest = TRUSTED - len(known)
        size = (self._size * len(known) + recalled.size * rest) / TRUSTED
        p50_s = _percentile(known + [recalled.p50_s] * rest, P50)
        return Point(size, p50_s, max(p50_s, _percentile(known + [recalled.p95_s] * rest, P95)))


def _percentile(durations: list[float], share: float) -> float:
    """Of three and more never the largest: one hiccup says nothing of those to come."""
    ascending = sorted(durations)
    rank = min(math.ceil(share * len(ascending)), max(len(ascending) - 1, 1)) if len(ascending) > 2 else 1
    return ascending[rank - 1]

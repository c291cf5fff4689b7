"""Learns the latency curve L(n) of a revision: how many seconds its workers take for a batch of n items.

Clipper (NSDI '17) and Clockwork (OSDI '20) predict from such profiles too. Here the curve consists of the
median and the 95th percentile for each batch size. Isotonic regression makes both series non-decreasing.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# The percentiles of a bucket are computed from its latest durations, at most this many. So the curve adapts
# if a machine becomes slower.
KEPT = 64
# The curve is computed again after this many observations, and after each observation in a bucket that has fewer than these.
RECOMPUTED_EVERY = 16
# A loaded point counts as this many durations. Each new duration of its bucket replaces one of them.
LOADED_WEIGHT = 32
# The weight of the latest batch in the mean cost of an item.
SMOOTHING = 0.1
# The smallest size of a batch: zero has no logarithm.
MIN_COST = 1e-6


class Point(NamedTuple):
    """A batch size (its total cost), and the median and 95th percentile of the batch duration in seconds."""

    size: float
    p50_s: float
    p95_s: float


class LatencyCurve:
    """One point for each bucket of sizes. A bucket spans a factor of sqrt(2). Between points, the curve is linear."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self.mean_cost = 1.0
        """The mean cost of an item, for example in tokens. A batch of n items has the size n x mean_cost."""
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)
        self.points: tuple[Point, ...] = ()
        """The points by ascending size. A point of a larger size never has a shorter time."""
        self._fresh = 0
        self.load(points)

    def load(self, points: Iterable[Point]) -> None:
        """Add points that were measured earlier. New durations of the same bucket gradually replace them."""
        for point in points:
            self._bucket(point.size).load(point)
        self._compute()

    def observe(self, count: int, cost: float, seconds: float) -> None:
        """Learn that a batch of `count` items, which together cost `cost`, took `seconds`."""
        self.mean_cost += SMOOTHING * (cost / count - self.mean_cost)
        size = max(cost, MIN_COST)
        bucket = self._bucket(size)
        bucket.add(size, seconds)
        self._fresh += 1
        if self._fresh >= RECOMPUTED_EVERY or bucket.count < RECOMPUTED_EVERY:
            self._compute()

    def typical(self, count: float) -> float:
        """Return the median duration of a batch of `count` items, in seconds; 0 if there is no point yet."""
        return self._at(count * self.mean_cost, 1)

    def bound(self, count: float) -> float:
        """Return the 95th percentile of a batch of `count` items, in seconds; 0 if there is no point yet."""
        return self._at(count * self.mean_cost, 2)

    def _bucket(self, size: float) -> _Bucket:
        return self._buckets[round(2 * math.log2(max(size, MIN_COST)))]

    def _compute(self) -> None:
        self._fresh = 0
        buckets = [self._buckets[number] for number in sorted(self._buckets)]
        points = [bucket.point() for bucket in buckets]
        p50s, p95s = (
            isotonic([(point[column], bucket.weight) for point, bucket in zip(points, buckets, strict=True)])
            for column in (1, 2)
        )
        rows = zip(points, p50s, p95s, strict=True)
        self.points = tuple(Point(point.size, p50, max(p50, p95)) for point, p50, p95 in rows)

    def _at(self, size: float, column: int) -> float:
        points = self.points
        if not points:
            return 0.0
        # A single point has no slope, so it predicts the same time for every size.
        if size <= points[0].size or len(points) == 1:
            return points[0][column]
        if size <= points[-1].size:
            right = bisect_left(points, (size,))
            return _interpolate(points[right - 1], points[right], size, column)
        # Extrapolate from the first and the last point, so that one odd point near the end matters little. The
        # medians may rise faster than the 95th percentiles, but the bound must not be below the medians.
        first, last = points[0], points[-1]
        found = max(last[column], _interpolate(first, last, size, column))
        return found if column == 1 else max(found, _interpolate(first, last, size, 1))


def _interpolate(left: Point, right: Point, size: float, column: int) -> float:
    share = (size - left.size) / max(right.size - left.size, 1e-9)
    return left[column] + share * (right[column] - left[column])


def isotonic(weighted: Sequence[tuple[float, float]]) -> list[float]:
    """Return the non-decreasing sequence that is nearest to the values of (value, weight) pairs.

    Adjacent pools of values are merged while the first is greater than the second (the pool adjacent
    violators algorithm). All values of a pool become its weighted median, on which outliers have no effect.
    """
    pools: list[list[tuple[float, float]]] = []
    for pair in weighted:
        pools.append([pair])
        while len(pools) > 1 and _median(pools[-2]) > _median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [level for pool in pools for level in [_median(pool)] * len(pool)]


def _median(pool: list[tuple[float, float]]) -> float:
    """Return the weighted median of (value, weight) pairs; of two candidates the lower one."""
    if len(pool) == 1:
        return pool[0][0]
    half, below = sum(weight for _, weight in pool) / 2, 0.0
    for value, weight in sorted(pool):
        below += weight
        if below >= half:
            return value
    raise AssertionError("a pool has a weight")


@dataclass(eq=False, slots=True)
class _Bucket:
    """The latest durations of batches of similar size, their mean size, and the loaded point, if any."""

    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _size: float = 0.0
    count: int = 0
    _loaded: Point | None = None

    def load(self, point: Point) -> None:
        self._loaded = point

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        self._size += (size - self._size) / min(self.count, KEPT)
        self._latest.append(seconds)

    @property
    def weight(self) -> int:
        return max(len(self._latest), LOADED_WEIGHT if self._loaded is not None else 0)

    def point(self) -> Point:
        latest, loaded = list(self._latest), self._loaded or Point(0.0, 0.0, 0.0)
        # If there are fewer than LOADED_WEIGHT durations, the loaded point stands in for each missing duration.
        missing = self.weight - len(latest)
        size = (self._size * len(latest) + loaded.size * missing) / self.weight
        p50_s = _percentile(latest + [loaded.p50_s] * missing, 0.5)
        return Point(size, p50_s, max(p50_s, _percentile(latest + [loaded.p95_s] * missing, 0.95)))


def _percentile(durations: list[float], share: float) -> float:
    """Return a percentile. Unless there is only one duration, it is never the largest, which may be an outlier."""
    ascending = sorted(durations)
    rank = min(math.ceil(share * len(ascending)), max(len(ascending) - 1, 1)) if len(ascending) > 2 else 1
    return ascending[rank - 1]

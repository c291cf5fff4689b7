"""The latency curve L(n): how long a batch of n items takes on a revision's workers, learned from results.

Clipper (NSDI '17) and Clockwork (OSDI '20) predict from such profiles too. Here the curve is the median and
the 95th percentile by batch size, made non-decreasing by isotonic regression.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# How many of the latest durations of each size count: the percentiles follow a machine that becomes slower.
KEPT = 64
# The curve is computed again after so many observations, and after each of the first ones of a size.
RECOMPUTED_EVERY = 16
# A loaded point weighs as much as so many durations; after so many new ones it no longer counts.
LOADED_WEIGHT = 32
SMOOTHING = 0.1
MIN_COST = 1e-6
P50, P95 = 0.5, 0.95


class Point(NamedTuple):
    """A batch size, and the median and 95th percentile of the seconds that such batches took."""

    size: float
    p50_s: float
    p95_s: float


class LatencyCurve:
    """Durations by size, in buckets half an octave wide; linear between the buckets' points."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        self.mean_cost = 1.0
        """The mean cost of an item, in tokens, say. A batch of three has the size 3 x mean_cost."""
        self._buckets: dict[int, _Bucket] = {}
        self.points: tuple[Point, ...] = ()
        """By ascending size; no larger size is faster than a smaller one."""
        self._sizes: list[float] = []
        self._fresh = 0
        self.load(points)

    def load(self, points: Iterable[Point]) -> None:
        """Take points that were measured before; newer durations of their size replace them."""
        for point in points:
            self._bucket(point.size).load(point)
        self._compute()

    @property
    def known(self) -> bool:
        return bool(self.points)

    def observe(self, count: int, cost: float, seconds: float) -> None:
        """Learn that a batch of `count` items, of `cost` together, took `seconds`."""
        self.mean_cost += SMOOTHING * (cost / count - self.mean_cost)
        size = max(cost, MIN_COST)
        bucket = self._bucket(size)
        bucket.add(size, seconds)
        self._fresh += 1
        if self._fresh >= RECOMPUTED_EVERY or bucket.count < RECOMPUTED_EVERY:
            self._compute()

    def typical(self, count: float) -> float:
        """Return the median seconds of a batch of `count` items; 0 while nothing is known."""
        return self._at(count * self.mean_cost, 1)

    def bound(self, count: float) -> float:
        """Return the 95th percentile in seconds of a batch of `count` items; 0 while nothing is known."""
        return self._at(count * self.mean_cost, 2)

    def _bucket(self, size: float) -> _Bucket:
        number = round(2 * math.log2(max(size, MIN_COST)))
        found = self._buckets.get(number)
        if found is None:
            found = self._buckets[number] = _Bucket()
        return found

    def _compute(self) -> None:
        self._fresh = 0
        buckets = [self._buckets[number] for number in sorted(self._buckets)]
        points, weights = [bucket.point() for bucket in buckets], [bucket.weight for bucket in buckets]
        p50s = isotonic([(point.p50_s, weight) for point, weight in zip(points, weights, strict=True)])
        p95s = isotonic([(point.p95_s, weight) for point, weight in zip(points, weights, strict=True)])
        self.points = tuple(
            Point(point.size, p50, max(p50, p95)) for point, p50, p95 in zip(points, p50s, p95s, strict=True)
        )
        self._sizes = [point.size for point in points]

    def _at(self, size: float, field: int) -> float:
        points = self.points
        if not points:
            return 0.0
        # A single point has no slope, so it predicts the same time for every size.
        if size <= points[0].size or len(points) == 1:
            return points[0][field]
        if size <= points[-1].size:
            right = bisect_left(self._sizes, size)
            return _interpolate(points[right - 1], points[right], size, field)
        # Extrapolate along the chord of the whole curve: one odd point at the end does not tilt it. The chord
        # of the medians may be the steeper one; the bound is never below the median.
        first, last = points[0], points[-1]
        found = max(last[field], _interpolate(first, last, size, field))
        return found if field == 1 else max(found, _interpolate(first, last, size, 1))


def _interpolate(left: Point, right: Point, size: float, field: int) -> float:
    share = (size - left.size) / max(right.size - left.size, 1e-9)
    return left[field] + share * (right[field] - left[field])


def isotonic(weighted: Sequence[tuple[float, float]]) -> list[float]:
    """Return the non-decreasing sequence nearest to (value, weight) pairs, by pooling adjacent violators.

    It minimises absolute distances, not squares: a pool becomes its weighted median, so one outlier does not
    tilt its neighbours.
    """
    pools: list[list[tuple[float, float]]] = []
    for pair in weighted:
        pools.append([pair])
        while len(pools) > 1 and _median(pools[-2]) > _median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [level for pool in pools for level in [_median(pool)] * len(pool)]


def _median(pool: list[tuple[float, float]]) -> float:
    """Return the lower weighted median."""
    if len(pool) == 1:
        return pool[0][0]
    half, below = sum(weight for _, weight in pool) / 2, 0.0
    for value, weight in sorted(pool):
        below += weight
        if below >= half:
            return value
    raise AssertionError("a pool has a weight")


class _Bucket:
    """The latest durations of batches of about one size."""

    __slots__ = ("_latest", "_loaded", "_size", "count")

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=KEPT)
        self._size = 0.0
        self.count = 0
        self._loaded: Point | None = None

    def load(self, point: Point) -> None:
        self._loaded = point

    def add(self, size: float, seconds: float) -> None:
        self.count += 1
        self._size += (size - self._size) / min(self.count, KEPT)
        self._latest.append(seconds)

    @property
    def weight(self) -> float:
        return max(len(self._latest), LOADED_WEIGHT if self._loaded is not None else 0)

    def point(self) -> Point:
        latest, loaded = list(self._latest), self._loaded
        if loaded is None or len(latest) >= LOADED_WEIGHT:
            return Point(self._size, _percentile(latest, P50), _percentile(latest, P95))
        # The loaded point stands for the durations that are still missing.
        missing = LOADED_WEIGHT - len(latest)
        size = (self._size * len(latest) + loaded.size * missing) / LOADED_WEIGHT
        p50_s = _percentile(latest + [loaded.p50_s] * missing, P50)
        return Point(size, p50_s, max(p50_s, _percentile(latest + [loaded.p95_s] * missing, P95)))


def _percentile(durations: list[float], share: float) -> float:
    """Return a percentile; of three and more durations never the largest, which may be an outlier."""
    ascending = sorted(durations)
    rank = min(math.ceil(share * len(ascending)), max(len(ascending) - 1, 1)) if len(ascending) > 2 else 1
    return ascending[rank - 1]

"""The latency curve L(n): how long a group of n takes on this revision's workers, learned from those that ran."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

# Of each size so many of the last durations count: a percentile of them follows a machine that becomes slower.
KEPT = 64
# One in so many observations makes the curve be drawn again, but each of the first ones does.
REDRAWN_EVERY = 16
SMOOTHING = 0.1
MIN_COST = 1e-6
P50, P95 = 0.5, 0.95


class Point(NamedTuple):
    """A size, and how many seconds groups of about that size took: the median and the 95th percentile."""

    size: float
    p50_s: float
    p95_s: float


class Curve:
    """Durations by size. Sizes lie in buckets half an octave wide; between their points the curve is straight."""

    def __init__(self, points: Iterable[Point] = ()) -> None:
        """`points` were measured before: they count until newer durations of their size have replaced them."""
        self.unit = 1.0
        """The mean cost of an item: where the handler counts tokens, say, a group of three is of size 3 x unit."""
        self._buckets: dict[int, _Bucket] = {}
        self._points: tuple[Point, ...] = ()
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
        p50s = isotonic([(point.p50_s, 1.0) for point in found])
        p95s = isotonic([(point.p95_s, 1.0) for point in found])
        self._points = tuple(
            Point(point.size, p50, max(p50, p95)) for point, p50, p95 in zip(found, p50s, p95s, strict=True)
        )

    def _at(self, size: float, field: int) -> float:
        points = self._points
        if not points:
            return 0.0
        if size <= points[0].size or len(points) == 1:
            # Of one point alone nobody knows a slope: what is not known is held against no caller.
            return points[0][field]
        for left, right in itertools.pairwise(points):
            if size <= right.size:
                return _between(left, right, size, field)
        # Beyond the last: on along the chord of the whole curve, which one odd point does not tilt.
        first, last = points[0], points[-1]
        return max(last[field], _between(first, last, size, field))


def _between(left: Point, right: Point, size: float, field: int) -> float:
    share = (size - left.size) / max(right.size - left.size, 1e-9)
    return left[field] + share * (right[field] - left[field])


def isotonic(weighted: list[tuple[float, float]]) -> list[float]:
    """The non-decreasing sequence nearest to these values by weighted squares (pool adjacent violators)."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in weighted:
        blocks.append((value, weight, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (low, low_weight, low_count), (high, high_weight, high_count) = blocks[-2:]
            weight_sum = low_weight + high_weight
            mean = (low * low_weight + high * high_weight) / weight_sum
            blocks[-2:] = [(mean, weight_sum, low_count + high_count)]
    return [value for value, _, count in blocks for _ in range(count)]


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

    def point(self) -> Point:
        known, recalled = sorted(self._last), self._recalled
        if recalled is not None and len(known) < KEPT // 4:
            # Too few for percentiles of their own: they move what was measured before by as much as they weigh.
            share = len(known) / (KEPT // 4)
            if not known:
                return recalled
            return Point(
                self._size,
                recalled.p50_s + share * (_percentile(known, P50) - recalled.p50_s),
                recalled.p95_s + share * (_percentile(known, P95) - recalled.p95_s),
            )
        return Point(self._size, _percentile(known, P50), _percentile(known, P95))


def _percentile(ascending: list[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1 if share < 1 else -1)]

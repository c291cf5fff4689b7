"""Forming a batch: run what waits at once, unless waiting for more items was learned to pay.

Dispatch is work-conserving by default, as in Clipper (NSDI '17). Callers in a closed loop return
together, a moment after their batch ended: there, the wait that gains the most is taken.
"""

from __future__ import annotations

from bisect import bisect_right

from .latency_curve import LatencyCurve

# A longer wait is considered only if it brings at least so many more items.
MIN_MORE = 0.25
# Arrivals are counted at steps of 1/32 of what merging two batches into one saves, up to 3/4 of it.
STEPS = 24
STEP = 1 / 32
SMOOTHING = 0.2


class ArrivalPattern:
    """A(t): the mean number of arrivals within t after the end of a batch, by batch size, for t on a grid."""

    def __init__(self) -> None:
        self._means: dict[int, list[float]] = {}
        self._offsets: list[float] = []
        self._size = 0
        self.ended_s: float | None = None
        """When the last batch ended."""

    def observe_end(self, now_s: float, size: int, saved_s: float) -> None:
        """A batch of `size` ended. `saved_s`, what merging two single items saves, is the grid's unit."""
        if self.ended_s is not None and saved_s > 0:
            self._learn(saved_s)
        self.ended_s, self._size = now_s, size
        self._offsets.clear()

    def observe_arrival(self, now_s: float) -> None:
        if self.ended_s is not None and len(self._offsets) < 4 * self._size + 16:
            self._offsets.append(now_s - self.ended_s)

    def expected(self) -> list[float]:
        """Return the means for the last batch's size at each step of the grid; empty if not known."""
        return self._means.get(self._octave(), [])

    def _learn(self, saved_s: float) -> None:
        ends_s = ((step + 1) * STEP * saved_s for step in range(STEPS))
        counts = [float(bisect_right(self._offsets, end_s)) for end_s in ends_s]
        means = self._means.setdefault(self._octave(), counts)
        means[:] = [mean + SMOOTHING * (count - mean) for mean, count in zip(means, counts, strict=True)]

    def _octave(self) -> int:
        """Return the octave of the last batch's size: similar sizes are followed by similar numbers."""
        return max(0, self._size - 1).bit_length()


def wait_until(
    now_s: float, queued: int, max_batch: int, slack_s: float, curve: LatencyCurve, arrivals: ArrivalPattern
) -> float:
    """Return until when to wait for more items; not after `now_s` means to run what waits now.

    `slack_s` is how long the most urgent item could still wait before it must start.

    Waiting t for k items to join the n that wait pays if it shortens the sum of all their times:
    n (L(n) - t - L(n+k)) + k (L(n) + L(k) - t - L(n+k)) > 0. The t with the largest sum is chosen.
    """
    ended_s, expected = arrivals.ended_s, arrivals.expected()
    if queued >= max_batch or ended_s is None or not expected:
        return now_s
    step_s, elapsed_s = STEP * saving(curve), now_s - ended_s
    # A saving may be too small to be divided into steps.
    if step_s <= 0 or elapsed_s >= len(expected) * step_s:
        return now_s
    arrived = _interpolate(expected, elapsed_s / step_s)
    alone_s = curve.typical(queued)
    best_gain, best_s, least = 0.0, now_s, 2 * MIN_MORE
    for step, mean in enumerate(expected, start=1):
        wait_s = step * step_s - elapsed_s
        more = min(mean - arrived, max_batch - queued)
        if wait_s <= 0 or more < least:
            continue
        least = more + MIN_MORE
        if wait_s > slack_s:
            break
        merged_s = wait_s + curve.typical(queued + more)
        gain = queued * (alone_s - merged_s) + more * (alone_s + curve.typical(more) - merged_s)
        if gain > best_gain:
            best_gain, best_s = gain, now_s + wait_s
    return best_s


def saving(curve: LatencyCurve) -> float:
    """Return the seconds that one batch of two saves over two batches of one: 2 L(1) - L(2)."""
    return 2 * curve.typical(1) - curve.typical(2)


def _interpolate(expected: list[float], position: float) -> float:
    """Return the mean at a position of the grid; 0 at 0."""
    below = int(position)
    left = expected[below - 1] if below else 0.0
    right = expected[min(below, len(expected) - 1)]
    return left + (position - below) * (right - left)

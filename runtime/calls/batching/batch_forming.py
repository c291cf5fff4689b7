"""Decides when a batch starts: immediately, unless past arrivals show that waiting reduces the total latency.

By default no slot stays free while items wait, as in Clipper (NSDI '17). But if callers send a new request after each
response, the new requests of a batch's callers all arrive shortly after the batch has ended. Then the next batch waits
for them, for the time with the largest gain.
"""

from __future__ import annotations

from bisect import bisect_right

from .latency_curve import LatencyCurve

# The shortest wait that counts brings at least 2 * MIN_MORE expected items. A longer wait counts only if it brings at least
# MIN_MORE more items than the next shorter wait that counts.
MIN_MORE = 0.25
# The grid: let s be the seconds that one batch of two saves over two batches of one (see `saving`). Arrivals
# are counted at STEPS points of time after the end of a batch: STEP * s, 2 * STEP * s, ... to 0.75 * s.
STEPS = 24
STEP = 1 / 32
# The weight of the latest batch in the mean numbers of arrivals.
SMOOTHING = 0.2


class ArrivalPattern:
    """The mean number of arrivals within t seconds after the end of a batch, for each t of the grid."""

    def __init__(self) -> None:
        # One list of means for each power-of-two class of the size of the batch that ended.
        self._means: dict[int, list[float]] = {}
        self._offsets: list[float] = []
        self._size = 0
        self.ended_s: float | None = None
        """When the last batch ended; None if no batch has ended yet."""

    def observe_end(self, now_s: float, size: int, saved_s: float) -> None:
        """Learn that a batch of `size` items ended. `saved_s` is the present `saving`."""
        if self.ended_s is not None and saved_s > 0:
            self._learn(saved_s)
        self.ended_s, self._size = now_s, size
        self._offsets.clear()

    def observe_arrival(self, now_s: float) -> None:
        # The limit on offsets bounds the memory if many items arrive during a long batch.
        if self.ended_s is not None and len(self._offsets) < 4 * self._size + 16:
            self._offsets.append(now_s - self.ended_s)

    def expected(self) -> list[float]:
        """Return the means for the last batch's size, one for each point of the grid; [] if unknown."""
        return self._means.get(self._octave(), [])

    def _learn(self, saved_s: float) -> None:
        ends_s = ((step + 1) * STEP * saved_s for step in range(STEPS))
        counts = [float(bisect_right(self._offsets, end_s)) for end_s in ends_s]
        means = self._means.setdefault(self._octave(), counts)
        means[:] = [mean + SMOOTHING * (count - mean) for mean, count in zip(means, counts, strict=True)]

    def _octave(self) -> int:
        """Return the power-of-two class of the last batch's size: 0 for 1, 1 for 2, 2 for 3-4, 3 for 5-8."""
        return max(0, self._size - 1).bit_length()


def wait_until(
    now_s: float, queued: int, max_batch: int, slack_s: float, curve: LatencyCurve, arrivals: ArrivalPattern
) -> float:
    """Return the time until which to wait for more items, at most `slack_s` from now; `now_s` means not to wait.

    Let n items wait (`queued`), and let k further items be expected within t seconds (`more`, `wait_s`). L is the
    median of the latency curve. If the n items run now, they end after L(n). The k items run after them, and end
    after L(n) + L(k). If all items wait, they end after t + L(n+k). Waiting shortens the sum of the items' times by
    n (L(n) - t - L(n+k)) + k (L(n) + L(k) - t - L(n+k)). The t with the largest positive gain is chosen.
    """
    ended_s, expected = arrivals.ended_s, arrivals.expected()
    if queued >= max_batch or ended_s is None or not expected:
        return now_s
    step_s, elapsed_s = STEP * saving(curve), now_s - ended_s
    # Do not wait if the step is zero, because batches save nothing, or if rounding has made the step zero.
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
    """Return the seconds that one batch of two items saves over two batches of one item: 2 L(1) - L(2)."""
    return 2 * curve.typical(1) - curve.typical(2)


def _interpolate(expected: list[float], position: float) -> float:
    """Return the mean at `position`, a number of steps of the grid. `expected[0]` is the mean at 1; the mean at 0 is 0."""
    below = int(position)
    left = expected[below - 1] if below else 0.0
    right = expected[min(below, len(expected) - 1)]
    return left + (position - below) * (right - left)

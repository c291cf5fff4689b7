"""The arrival pattern: how many invocations arrive after the end of a batch, and how soon.

Callers in a closed loop send their next request when they have a response, so they return together, a moment
after their batch ended. A batch of only the first of them would make all others wait for a whole run.
"""

from __future__ import annotations

from bisect import bisect_right

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

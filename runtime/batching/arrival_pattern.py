"""The arrival pattern: how many invocations arrive after the end of a batch, and how soon.

Callers in a closed loop send their next request when they have a response, so they return together, a moment
after their batch ended. A batch of only the first of them would make all others wait for a whole run.
"""

from __future__ import annotations

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
        return self._means.get(_octave(self._size), [])

    def _learn(self, saved_s: float) -> None:
        counts, index = [0.0] * STEPS, 0
        for step in range(STEPS):
            until_s = (step + 1) * STEP * saved_s
            while index < len(self._offsets) and self._offsets[index] <= until_s:
                index += 1
            counts[step] = float(index)
        means = self._means.setdefault(_octave(self._size), counts)
        means[:] = [mean + SMOOTHING * (count - mean) for mean, count in zip(means, counts, strict=True)]


def _octave(size: int) -> int:
    """Return the octave of a batch size: batches of similar size are followed by similar numbers."""
    return max(0, size - 1).bit_length()

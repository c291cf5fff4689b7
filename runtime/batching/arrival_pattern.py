"""The returns: how many arrivals follow the end of a group, and how soon. Learned, to know whether waiting pays.

Callers that send their next request once they have an answer come back in a swarm, a moment after their group ended.
Taking the first of them alone would make all others wait for a whole run. See reference/batching.md, step 5.
"""

from __future__ import annotations

# Waits are looked at in steps of 1/32 of what joining two groups into one saves, up to 3/4 of it.
STEPS = 24
STEP = 1 / 32
SMOOTHING = 0.2


class ArrivalPattern:
    """A(t): the mean number of arrivals within t after the end of a group of some size, for t on a grid."""

    def __init__(self) -> None:
        self._means: dict[int, list[float]] = {}
        self._offsets: list[float] = []
        self._ended_s: float | None = None
        self._size = 0

    def ended(self, now_s: float, size: int, saved_s: float) -> None:
        """A group of `size` ended. `saved_s` is what joining two single items saves: the unit of the grid."""
        self._learn(saved_s)
        self._ended_s, self._size = now_s, size
        self._offsets.clear()

    def arrived(self, now_s: float) -> None:
        if self._ended_s is not None and len(self._offsets) < 4 * self._size + 16:
            self._offsets.append(now_s - self._ended_s)

    @property
    def ended_s(self) -> float | None:
        """When the last group ended."""
        return self._ended_s

    def expected(self) -> list[float]:
        """The means for this last group's size, at each step of the grid; empty while nothing is known."""
        return self._means.get(_class_of(self._size), [])

    def _learn(self, saved_s: float) -> None:
        if self._ended_s is None or saved_s <= 0:
            return
        counts, index = [0.0] * STEPS, 0
        for step in range(STEPS):
            until_s = (step + 1) * STEP * saved_s
            while index < len(self._offsets) and self._offsets[index] <= until_s:
                index += 1
            counts[step] = float(index)
        known = self._means.get(_class_of(self._size))
        if known is None:
            self._means[_class_of(self._size)] = counts
        else:
            known[:] = [mean + SMOOTHING * (count - mean) for mean, count in zip(known, counts, strict=True)]


def _class_of(size: int) -> int:
    """Groups of similar size are followed by similar numbers: octaves."""
    return max(0, size - 1).bit_length()

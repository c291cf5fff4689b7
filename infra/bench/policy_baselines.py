"""The hybrid histogram policy of Serverless in the Wild and idle timeouts, each for one function.

`policy_replays.py` replays many of them at once. These are the plain versions to which it is held.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from pilotflame.runtime.scaling.ladder import Ladder, Plan, Step
from policy_replays import HEAD, HISTOGRAM_BINS, LEAST_VARIATION, MARGIN, TAIL


def timeout(timeout_s: float, floor: int) -> Plan:
    """READY until the timeout, and then the floor rung."""
    return (Step(0.0, 0),) if timeout_s == math.inf else (Step(0.0, 0), Step(timeout_s, floor))


class Hybrid:
    """The hybrid histogram policy of Serverless in the Wild, without its time series of very long gaps."""

    def __init__(self, width_s: float, floor: int, ladder: Ladder) -> None:
        self._width_s, self._floor, self._wakes = width_s, floor, ladder.rungs
        self._counts = Counter[int]()
        self._outside = 0

    def plan(self, since_s: float) -> Plan:
        known = sum(self._counts.values())
        stay = timeout(HISTOGRAM_BINS * self._width_s, self._floor)
        if known == 0 or self._outside > known or self._variation(known) < LEAST_VARIATION:
            return stay
        head_s = self._percentile(HEAD, known) * self._width_s * (1 - MARGIN)
        tail_s = (self._percentile(TAIL, known) + 1) * self._width_s * (1 + MARGIN)
        wake_s = self._wakes[self._floor].wake_s
        if head_s <= wake_s:
            return timeout(tail_s, self._floor)
        return (Step(0.0, self._floor), Step(head_s - wake_s, 0), Step(tail_s, self._floor))

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[float]) -> None:
        index = int(idle_s / self._width_s)
        if index < HISTOGRAM_BINS:
            self._counts[index] += 1
        else:
            self._outside += 1

    def _variation(self, known: int) -> float:
        mean = known / HISTOGRAM_BINS
        squares = sum(count * count for count in self._counts.values()) / HISTOGRAM_BINS
        return math.sqrt(max(0.0, squares - mean * mean)) / mean

    def _percentile(self, share: float, known: int) -> int:
        seen = 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen >= share * known:
                return index
        return HISTOGRAM_BINS

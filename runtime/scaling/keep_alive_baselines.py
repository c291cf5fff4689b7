"""Keep-alive policies that others use, and what could at best be had, to compare ours with in simulations."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence

from .ladder import BurstWait, Ladder, Plan, Step

# Serverless in the Wild (Shahrad et al., USENIX ATC 2020): a histogram of four hours, its 5th and 99th percentiles, and a
# margin of 10 %. Where the histogram says little (its bins' counts vary by less than 2), the function stays.
HISTOGRAM_BINS, HEAD, TAIL, MARGIN, LEAST_VARIATION = 240, 0.05, 0.99, 0.1, 2.0
# A step up that is planned to end at an arrival ends so much earlier, whatever the sums are rounded to.
ROUNDING_S = 1e-6


def timeout(timeout_s: float, floor: int) -> Plan:
    """Return the plan that holds READY until the timeout, and then the rung `floor`."""
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

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[BurstWait]) -> None:
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


def _climb(rung: int, wakes: Sequence[float], ready_s: float) -> Plan:
    """Return the plan that stands on `rung` and is READY at `ready_s`. It ends there: the call has come."""
    stages = (Step(ready_s - wakes[upper + 1], upper) for upper in reversed(range(rung)))
    return (Step(0.0, rung), *stages)


class Foreseeing:
    """The policy that knows all arrivals of its function, which no other can beat."""

    def __init__(self, arrivals: Sequence[float], ladder: Ladder) -> None:
        self._arrivals, self._ladder = arrivals, ladder
        self._woken_at_s = arrivals[0] if arrivals else 0.0

    def plan(self, since_s: float) -> Plan:
        idle_from_s = self._woken_at_s + since_s
        number = bisect.bisect_right(self._arrivals, idle_from_s)
        if number == len(self._arrivals):
            return (Step(0.0, len(self._ladder.rungs) - 1),)
        idle_s, rungs = self._arrivals[number] - idle_from_s, self._ladder.rungs
        waits = [self._burst_wait(number, rung.wake_s) for rung in rungs]
        costs = self._ladder.costs(waits)
        plans: list[Plan] = [(Step(0.0, rung),) for rung in range(len(rungs))]
        plans += [
            _climb(rung, costs.wakes, idle_s - ROUNDING_S)
            for rung, wake_s in enumerate(costs.wakes)
            if 0 < wake_s < idle_s - ROUNDING_S
        ]
        return min(plans, key=lambda plan: costs.bill(plan, idle_s))

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[BurstWait]) -> None:
        self._woken_at_s += since_s + idle_s

    def _burst_wait(self, number: int, wake_s: float) -> float:
        ready_s = self._arrivals[number] + wake_s
        end = bisect.bisect_left(self._arrivals, ready_s, number)
        return sum(ready_s - arrival_s for arrival_s in self._arrivals[number:end])

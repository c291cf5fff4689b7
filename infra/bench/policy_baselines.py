"""Keep-alive policies that others use, and what could at best be had, for the benchmark of ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from pilotflame.runtime.scaling.idle_law import IdleLaw, cheapest
from pilotflame.runtime.scaling.ladder import Costs, Ladder, Plan, Step
from pilotflame.runtime.scaling.ladder_simulator import Fixed, KeepAlivePolicy, LadderRun, Replay, run

SERVICE_S = 0.2
TIMEOUTS_S = (0.001, *(10 ** (power / 4) for power in range(-3, 21, 2)), math.inf)
BIN_WIDTHS_S = (1.0, 10.0, 60.0, 600.0)
# Serverless in the Wild (Shahrad et al., USENIX ATC 2020): a histogram of four hours, its 5th and 99th percentiles, and a
# margin of 10 %. Where the histogram says little (its bins' counts vary by less than 2), the function stays.
HISTOGRAM_BINS, HEAD, TAIL, MARGIN, LEAST_VARIATION = 240, 0.05, 0.99, 0.1, 2.0
LARGEST_SAMPLE = 400
Policies = Callable[[], KeepAlivePolicy]


def replay_all(functions: Sequence[Sequence[float]], ladder: Ladder, policy: Policies) -> list[LadderRun]:
    """Replay each function under a policy of its own."""
    return [run(Replay(arrivals, SERVICE_S, ladder, policy())) for arrivals in functions]


def total(runs: Sequence[LadderRun]) -> LadderRun:
    whole = LadderRun()
    for one in runs:
        whole += one
    return whole


def timeout(timeout_s: float, floor: int) -> Plan:
    """READY until the timeout, and then the floor rung."""
    return (Step(0.0, 0),) if timeout_s == math.inf else (Step(0.0, 0), Step(timeout_s, floor))


def fixed_timeouts(functions: Sequence[Sequence[float]], ladder: Ladder) -> list[LadderRun]:
    """What each timeout and floor rung costs the whole class."""
    plans = [timeout(at_s, floor) for floor in range(1, len(ladder.rungs)) for at_s in TIMEOUTS_S]
    return [total(replay_all(functions, ladder, partial(Fixed, plan))) for plan in plans]


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


def hybrids(functions: Sequence[Sequence[float]], ladder: Ladder) -> list[LadderRun]:
    """What the hybrid histogram costs with each width of its bins and each floor rung."""
    return [
        total(replay_all(functions, ladder, partial(Hybrid, width, floor, ladder)))
        for width in BIN_WIDTHS_S
        for floor in range(1, len(ladder.rungs))
    ]


def own_best_ladder(run_of: LadderRun, costs: Costs) -> Plan:
    """The best fixed plan without steps up for the idle periods of one function, all of them known."""
    ascending = sorted(run_of.periods)
    step = max(1, len(ascending) // LARGEST_SAMPLE)
    edges = sorted({0.0, *ascending[::step], ascending[-1]})
    counts = [0] * (len(edges) - 1)
    index = 0
    for period in ascending:
        while index < len(counts) - 1 and period > edges[index + 1]:
            index += 1
        counts[index] += 1
    law = IdleLaw(tuple(edges), tuple(map(float, counts)), (0,) * len(edges))
    return cheapest(law, costs, climbs=False, guarded=False).plan()


def offline_optimum(run_of: LadderRun, costs: Costs, *, climbs: bool) -> float:
    """The bill of one who knows when each idle period ends, with or without steps up before its end."""
    bill = 0.0
    for period in run_of.periods:
        staying = min(
            hold * period + penalty for hold, penalty in zip(costs.holds, costs.penalties, strict=True)
        )
        if climbs:
            staying = min(staying, _climbing(period, costs))
        bill += staying
    return bill


def _climbing(period_s: float, costs: Costs) -> float:
    """The cheapest rung to rest on, if one climbs to READY just in time."""
    best = math.inf
    for rung in range(1, len(costs.holds)):
        climb_s = costs.wakes[rung]
        if climb_s <= period_s:
            best = min(best, costs.holds[rung] * (period_s - climb_s) + costs.holds[0] * climb_s)
    return best

"""infra/bench/policy_*.py: many replays at once equal the simulator's replays, and no plan beats hindsight."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.scaling.ladder import BurstWait, Ladder, Plan, Rung, Step
from pilotflame.runtime.scaling.ladder_simulator import Fixed, Learned, Replay, run, timeout
from pilotflame.runtime.scaling.rung_figures import RungFigures
from pilotflame.runtime.telemetry.rung_name import RungName

sys.path.insert(0, str(Path(__file__).parents[1] / "infra" / "bench"))

from policy_bench import begins_of
from policy_hindsight import best_descent, optimum, own_best
from policy_live import Call, Caller, compare, replay_simulated
from policy_replays import (
    HEAD,
    HISTOGRAM_BINS,
    LEAST_VARIATION,
    MARGIN,
    SERVICE_S,
    TAIL,
    TIMEOUTS_S,
    Hybrids,
    descend,
    timeouts,
)
from report import Report

LADDER = Ladder((Rung(1.0, 0.0), Rung(0.5, 2.0), Rung(0.0, 10.0)), wait_per_s=3.0)
arrivals = st.lists(st.floats(0.0, 30.0), min_size=2, max_size=40).map(lambda gaps: list(accumulate(gaps)))


def plan_of(begins: Sequence[float]) -> Plan:
    steps = [Step(0.0, 0)]
    for rung, at_s in enumerate(begins, 1):
        if at_s == steps[-1].offset_s:
            steps.pop()
        if at_s < math.inf:
            steps.append(Step(at_s, rung))
    return tuple(steps)


@given(arrivals, st.lists(st.tuples(st.floats(0, 40), st.floats(0, 40)), min_size=1, max_size=5))
def test_many_plans_at_once_cost_what_each_costs_alone(
    at_s: list[float], times: list[tuple[float, float]]
) -> None:
    rows = [sorted(pair) for pair in times]
    together = descend(at_s, LADDER, np.array(rows))
    for number, begins in enumerate(rows):
        alone = run(Replay(at_s, SERVICE_S, LADDER, Fixed(plan_of(begins))))
        assert together.held[number] == pytest.approx(alone.held)
        assert together.waited_s[number] == pytest.approx(alone.waited_s, abs=1e-9)
        assert (together.woken[number], together.felt[number]) == (alone.woken, alone.felt)


def test_the_timeouts_are_all_pairs_of_a_timeout_and_a_floor() -> None:
    rows = [plan_of(begins) for begins in timeouts(LADDER).tolist()]
    assert rows[1 : len(TIMEOUTS_S)] == [timeout(at_s, 1) for at_s in TIMEOUTS_S[1:]]
    assert rows[len(TIMEOUTS_S)] == (Step(0.0, 2),)


class Hybrid:
    """The hybrid histogram policy of one function, which `Hybrids` runs for many at once."""

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


def test_the_hybrid_histogram_learns_a_timer() -> None:
    policy = Hybrid(10, 2, LADDER)
    assert policy.plan(0.0) == timeout(2400, 2)
    for _ in range(10):
        policy.learn(600, 0.2, ())
    assert policy.plan(0.0) == (Step(0.0, 2), Step(600 * 0.9 - 10, 0), Step(610 * 1.1, 2))


@settings(max_examples=30)
@given(st.lists(st.floats(0.0, 300.0), min_size=30, max_size=120))
def test_many_hybrids_at_once_cost_what_each_costs_alone(gaps: list[float]) -> None:
    at_s = list(accumulate([*gaps, *[600.0] * 30]))
    together = Hybrids.on([LADDER])
    totals = together.replay(at_s)
    for number, (floor, width_s) in enumerate(product((1, 2), (1.0, 10.0, 60.0, 600.0))):
        alone = run(Replay(at_s, SERVICE_S, LADDER, Hybrid(width_s, floor, LADDER)))
        assert totals.bills(3.0)[number] == pytest.approx(alone.bill(3.0))


def brute_force(at_s: list[float], rungs: Sequence[int]) -> float:
    """Return the cost of a plan that ends each idle period on a rung chosen in advance."""

    class Chosen(Fixed):
        def plan(self, since_s: float) -> Plan:
            return (Step(0.0, next(choices)),)

    choices = iter(rungs)
    return run(Replay(at_s, SERVICE_S, LADDER, Chosen(()))).bill(LADDER.wait_per_s)


@settings(max_examples=25)
@given(st.lists(st.floats(0.0, 15.0), min_size=2, max_size=6))
def test_the_offline_optimum_is_the_best_of_all_choices(gaps: list[float]) -> None:
    at_s = list(accumulate(gaps))
    best = min(brute_force(at_s, rungs) for rungs in product(range(3), repeat=len(at_s)))
    assert optimum(at_s, LADDER, [LADDER.wait_per_s])[0, 0] == pytest.approx(best, abs=1e-9)


@settings(max_examples=30)
@given(arrivals)
def test_no_plan_beats_hindsight(at_s: list[float]) -> None:
    never, climbing = optimum(at_s, LADDER, [LADDER.wait_per_s])[:, 0]
    ski_rental, *others = (
        run(Replay(at_s, SERVICE_S, LADDER, policy)).bill(LADDER.wait_per_s)
        for policy in (
            Fixed(LADDER.costs().ski_rental),
            Learned(LADDER),
            Fixed(timeout(20, 2)),
            Fixed(timeout(math.inf, 1)),
        )
    )
    steps = begins_of(LADDER.costs().ski_rental, len(LADDER.rungs))
    own = own_best(at_s, LADDER, (np.array([]), np.array([], dtype=np.int64)), steps)
    assert climbing <= never + 1e-9
    assert never <= own + 1e-9
    assert own <= ski_rental + 1e-9
    assert never <= min(others) + 1e-9


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 5), st.floats(0, 60)), min_size=1, max_size=20))
def test_the_best_descent_is_as_good_as_any_pair_of_switch_times(
    samples: list[tuple[float, float, float]],
) -> None:
    idles = np.array([idle_s for idle_s, _, _ in samples])
    penalties = np.array([(0.0, some, some + more) for _, some, more in samples])
    holds = np.array([1.0, 0.5, 0.0])

    def bill(begins: Sequence[float]) -> float:
        first, second = begins
        held = np.minimum(idles, first) + 0.5 * np.clip(idles - first, 0, second - first)
        rungs = (idles > first).astype(int) + (idles > second)
        return float(held.sum() + penalties[np.arange(len(idles)), rungs].sum())

    moments = [0.0, *sorted(idles.tolist()), math.inf]
    pairs = [
        (first, second)
        for first, second in product(moments, repeat=2)
        if first <= second and first < math.inf
    ]
    found = best_descent(idles, penalties, holds)
    assert bill([min(at_s, 1e9) for at_s in found]) <= min(map(bill, pairs)) + 1e-9


def test_live_waiting_is_that_of_the_simulator_if_the_gateway_does_what_the_simulator_does() -> None:
    figures = RungFigures(
        {RungName.READY: 36e6, RungName.ZYGOTE: 12e6}, {RungName.ZYGOTE: (0.5,), RungName.LOCAL: (3.0,)}
    )
    at_s = [20.0 * number for number in range(30)]
    caller = Caller("timer", at_s, 2.0, 0.5, [Call(one, SERVICE_S, cold=False) for one in at_s])
    (run_of,) = replay_simulated([caller], {"timer": figures})
    assert run_of.waited_s > 0
    waits = [*run_of.waits, *([0.0] * (len(at_s) - 1 - len(run_of.waits)))]
    caller.calls = [
        caller.calls[0],
        *(
            Call(one, SERVICE_S + waited_s, waited_s > 0)
            for one, waited_s in zip(at_s[1:], waits, strict=True)
        ),
    ]
    for slower, share in ((0.0, 0.0), (0.3, 0.3 * run_of.woken / run_of.waited_s)):
        for call in caller.calls:
            call.took_s += slower * call.cold
        report = Report("test")
        compare(report, [caller], [run_of])
        assert report.values["live_vs_simulated_share"] == pytest.approx(share)

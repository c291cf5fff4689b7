"""infra/bench/policy_*.py: replays that run together equal those of the simulator, and no plan beats hindsight."""

import math
import sys
from collections.abc import Sequence
from itertools import accumulate, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.ladder import IdlePlan, Ladder, Rung, Step
from pilotflame.runtime.node.scaling.ladder_simulator import Fixed, Learned, Replay, run, timeout

sys.path.insert(0, str(Path(__file__).parents[1] / "infra" / "bench"))

from policy_replays import SERVICE_S, TIMEOUTS_S, descend, optimum, timeouts

LADDER = Ladder((Rung(1.0, 0.0), Rung(0.5, 2.0), Rung(0.0, 10.0)), wait_per_s=3.0)
arrivals = st.lists(st.floats(0.0, 30.0), min_size=2, max_size=40).map(lambda gaps: list(accumulate(gaps)))


def plan_of(begins: Sequence[float]) -> IdlePlan:
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


def brute_force(at_s: list[float], rungs: Sequence[int]) -> float:
    """Return the cost of a plan that ends each idle period on a rung chosen in advance."""

    class Chosen(Fixed):
        def plan(self, since_s: float) -> IdlePlan:
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
    # A learned plan may step up before an arrival. The other plans only step down.
    learned, *others = (
        run(Replay(at_s, SERVICE_S, LADDER, policy)).bill(LADDER.wait_per_s)
        for policy in (
            Learned(LADDER),
            Fixed(LADDER.costs().ski_rental),
            Fixed(timeout(20, 2)),
            Fixed(timeout(math.inf, 1)),
        )
    )
    assert climbing <= min(never, learned) + 1e-9
    assert never <= min(others) + 1e-9

"""The ladder: its ski-rental schedule, and the cost of a plan."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.ladder import Costs, IdlePlan, Ladder, Rung, Step

# A second costs 1 on READY, 0.5 on PARKED, nothing on REMOTE, and 10 for a caller that waits. PARKED wakes in 2 s, REMOTE in
# 10 s.
THREE = Ladder((Rung(1.0, 0.0), Rung(0.5, 2.0), Rung(0.0, 10.0)), wait_per_s=10.0)


@st.composite
def ladders(draw: st.DrawFn) -> Ladder:
    """Draw a ladder whose holding costs descend and whose wake times ascend."""
    count = draw(st.integers(2, 6))
    holds = sorted(draw(st.lists(st.floats(1e-9, 1.0), min_size=count, max_size=count)), reverse=True)
    wakes = sorted(draw(st.lists(st.floats(0.0, 100.0), min_size=count - 1, max_size=count - 1)))
    rungs = tuple(Rung(*pair) for pair in zip(holds, [0.0, *wakes], strict=True))
    return Ladder(rungs, draw(st.floats(1e-5, 10.0)))


def assert_orderly(plan: IdlePlan, rungs: int) -> None:
    offsets = [step.offset_s for step in plan]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert all(0 <= step.rung < rungs for step in plan)


def test_wake_times_that_do_not_ascend_from_zero_are_refused() -> None:
    for wakes in ((), (1.0, 2.0), (0.0, 2.0, 1.0)):
        with pytest.raises(ValueError, match="wake times"):
            Ladder(tuple(Rung(1.0, wake) for wake in wakes), 1.0)


def test_the_ski_rental_schedule_steps_down_where_the_lower_rung_has_become_cheaper() -> None:
    # An arrival on PARKED costs 2 s of waiting at 10 and 2 s of READY at 1, which is 22. An arrival on REMOTE costs 110.
    assert THREE.costs().penalties == (0.0, 22.0, 110.0)
    assert THREE.costs().ski_rental == (Step(0.0, 0), Step(44.0, 1), Step(176.0, 2))


def test_the_followers_of_an_arrival_keep_a_function_warm_for_longer() -> None:
    lonely, crowded = THREE.costs(), THREE.costs([0.0, 20.0, 100.0])
    assert crowded.ski_rental[1].offset_s > lonely.ski_rental[1].offset_s


def test_a_rung_that_is_never_worth_it_is_left_out() -> None:
    ladder = Ladder((Rung(1.0, 0.0), Rung(0.9, 9.0), Rung(0.0, 10.0)), 10.0)
    assert [step.rung for step in ladder.costs().ski_rental] == [0, 2]


@given(ladders(), st.floats(0.0, 1e7))
def test_the_ski_rental_schedule_costs_at_most_twice_the_best_rung(ladder: Ladder, idle_s: float) -> None:
    costs = ladder.costs()
    assert_orderly(costs.ski_rental, len(ladder.rungs))
    best = min(hold * idle_s + penalty for hold, penalty in zip(costs.holds, costs.penalties, strict=True))
    assert costs.bill(costs.ski_rental, idle_s) <= 2 * best * (1 + 1e-9)


@given(ladders(), st.floats(0.0, 1e7))
def test_the_ski_rental_schedule_only_goes_down(ladder: Ladder, idle_s: float) -> None:
    rungs = [step.rung for step in ladder.costs().ski_rental]
    assert rungs == sorted(set(rungs))
    assert ladder.costs().bill(((Step(0.0, 0)),), idle_s) == pytest.approx(
        ladder.rungs[0].hold_per_s * idle_s
    )


def test_a_bill_is_what_was_held_and_the_penalty_of_the_rung() -> None:
    costs = THREE.costs()
    plan = (Step(0.0, 0), Step(4.0, 1), Step(10.0, 2))
    # An arrival at the very moment of a step counts as before the step.
    bills = [costs.bill(plan, idle_s) for idle_s in (0.0, 4.0, 6.0, 10.0, 1000.0)]
    assert bills == [0.0, 4.0, 4 + 1 + 22, 4 + 3 + 22, 4 + 3 + 110]


def test_an_arrival_during_a_prewarm_pays_for_what_is_left_of_it() -> None:
    costs = THREE.costs()
    # From REMOTE, READY is reached 10 s after the step.
    plan = (Step(0.0, 2), Step(100.0, 0), Step(200.0, 2))
    assert costs.bill(plan, 100.0) == 110
    assert costs.bill(plan, 105.0) == 5 + 55
    assert costs.bill(plan, 110.0) == 10
    assert costs.bill(plan, 150.0) == 50
    assert costs.bill(plan, math.nextafter(200, 300)) == pytest.approx(100 + 110)


def test_a_step_to_the_same_rung_does_not_complete_a_prewarm() -> None:
    costs = THREE.costs()
    plan = (Step(0.0, 2), Step(100.0, 0), Step(101.0, 0), Step(102.0, 1))
    assert costs.bill(plan, 102.0) == pytest.approx(2 + 22 + 88 * 6 / 8)
    # A step down to a rung that the prewarm has not reached does not complete it either.
    assert costs.bill(plan, 103.0) == pytest.approx(2 + 0.5 + 22 + 88 * 5 / 8)
    assert costs.bill(plan, 200.0) == pytest.approx(2 + 49 + 22)


@given(
    ladders(), st.lists(st.tuples(st.floats(0.1, 100.0), st.integers(0, 1)), max_size=6), st.floats(0, 700.0)
)
def test_a_repeated_step_changes_no_bill(
    ladder: Ladder, steps: list[tuple[float, int]], idle_s: float
) -> None:
    costs, offset_s, plan = ladder.costs(), 0.0, [Step(0.0, len(ladder.rungs) - 1)]
    for later_s, rung in steps:
        offset_s += later_s
        plan.append(Step(offset_s, rung))
    between = [Step((before.offset_s + after.offset_s) / 2, before.rung) for before, after in pairwise(plan)]
    repeated = sorted([*plan, *between], key=lambda step: step.offset_s)
    assert costs.bill(tuple(repeated), idle_s) == pytest.approx(costs.bill(tuple(plan), idle_s))


def test_costs_are_equal_if_their_figures_are() -> None:
    assert THREE.costs() == Costs((1.0, 0.5, 0.0), (0.0, 2.0, 10.0), (0.0, 22.0, 110.0))

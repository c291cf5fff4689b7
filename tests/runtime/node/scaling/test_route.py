"""Plans of the rungs on which a function is to be at certain times."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.ladder import IdlePlan, Ladder, Step
from pilotflame.runtime.node.scaling.route import PlanRoute, clamped

from .test_ladder import THREE, assert_orderly, ladders

WAKES = THREE.costs().wakes


@st.composite
def routes(draw: st.DrawFn, ladder: Ladder, *, climbs: bool) -> IdlePlan:
    """Draw a plan that a strategy could make."""
    rungs = draw(st.lists(st.integers(0, len(ladder.rungs) - 1), min_size=1, max_size=6))
    if not climbs:
        rungs.sort()
    route, at_s = PlanRoute(rungs[0], ladder.costs().wakes), 0.0
    for before, rung in pairwise(rungs):
        at_s += draw(st.floats(0.1, 300.0))
        if rung != before:
            route.reach(rung, at_s)
    return route.plan()


def rung_at(plan: IdlePlan, at_s: float) -> int:
    return [step.rung for step in plan if step.offset_s <= at_s][-1]


def test_a_clamped_plan_climbs_later_because_its_climb_is_shorter() -> None:
    bold = (Step(0.0, 2), Step(50.0, 1), Step(58.0, 0), Step(70.0, 2))
    steady = (Step(0.0, 0), Step(44.0, 1), Step(176.0, 2))
    assert clamped(bold, steady, 2, WAKES) == bold
    # Both plans reach READY after 60 s. The clamped plan leaves PARKED when the steady plan leaves it.
    assert clamped(bold, steady, 1, WAKES) == (Step(0.0, 1), Step(58.0, 0), Step(70.0, 1), Step(176.0, 2))
    assert clamped(bold, steady, 0, WAKES) == (
        Step(0.0, 0), Step(44.0, 1), Step(58.0, 0), Step(70.0, 1), Step(176.0, 2),
    )  # fmt: skip


def test_a_climb_goes_rung_by_rung_so_that_the_upper_one_is_paid_last() -> None:
    route = PlanRoute(2, WAKES)
    route.reach(0, 100.0)
    route.reach(2, 130.0)
    assert route.plan() == (Step(0.0, 2), Step(90.0, 1), Step(98.0, 0), Step(130.0, 2))
    costs = THREE.costs()
    # Climbing rung by rung reaches READY at the same time as one step, and costs less.
    at_once = (Step(0.0, 2), Step(90.0, 0), Step(130.0, 2))
    assert costs.bill(route.plan(), 100.0) == 8 * 0.5 + 2
    assert costs.bill(at_once, 100.0) == 10


@given(st.data(), ladders())
def test_a_clamped_plan_stands_between_both_plans_or_on_the_lowest_rung(
    data: st.DataObject, ladder: Ladder
) -> None:
    bold, steady = data.draw(routes(ladder, climbs=True)), data.draw(routes(ladder, climbs=False))
    lowest = data.draw(st.integers(0, len(ladder.rungs) - 1))
    plan = clamped(bold, steady, lowest, ladder.costs().wakes)
    assert_orderly(plan, len(ladder.rungs))
    for offset_s, rung in plan:
        assert rung <= max(lowest, rung_at(steady, offset_s))
    assert all(before.rung != after.rung for before, after in pairwise(plan))

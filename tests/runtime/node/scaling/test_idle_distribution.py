"""Distributions of idle times, and the cheapest plans for them."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.idle_distribution import (
    LONGEST_S,
    PRIOR_SAMPLES,
    TAIL_SAMPLES,
    IdleDistribution,
    Prior,
    cheapest,
    distribution_of,
)
from pilotflame.runtime.node.scaling.ladder import Costs, IdlePlan, Ladder, Rung, Step

from .test_ladder import THREE, assert_orderly, ladders

NO_PRIOR = Prior().cdf()


def expected_bill(distribution: IdleDistribution, costs: Costs, plan: IdlePlan) -> float:
    """Return the mean cost of `plan` for idle periods with this distribution. All periods of a bin end in its middle."""
    total = sum(distribution.masses)
    middles = [
        (distribution.edges[index] + distribution.edges[index + 1]) / 2
        for index in range(len(distribution.masses))
    ]
    pairs = zip(distribution.masses, middles, strict=True)
    return sum(mass / total * costs.bill(plan, middle) for mass, middle in pairs)


def test_a_prior_learns_less_of_those_it_knows_and_never_forgets_the_rest() -> None:
    prior = Prior()
    assert prior.cdf()(LONGEST_S * 10) == pytest.approx(1.0)
    even = prior.cdf()(10.0)
    for known in range(100):
        prior = prior.learn(1.0, known)
    assert prior.cdf()(2.0) - prior.cdf()(0.9) > 0.4
    # Half of the prior stays log-uniform.
    assert 1 - prior.cdf()(10.0) == pytest.approx((1 - even) / 2, rel=0.1)
    assert sum(prior.weights) < math.log(110 / 10) + 0.2


@given(st.lists(st.floats(0.0, 1e8), max_size=200), ladders())
def test_all_samples_are_in_the_law(samples: list[float], ladder: object) -> None:
    distribution = distribution_of(samples, THREE.costs(), NO_PRIOR)
    assert list(distribution.edges) == sorted(set(distribution.edges))
    assert len(distribution.masses) == len(distribution.edges) - 1 == len(distribution.longer) - 1
    assert min(distribution.masses) >= 0
    within = sum(sample <= LONGEST_S for sample in samples)
    assert within <= sum(distribution.masses) + 0.3 + sum(sample == 0 for sample in samples)
    assert sum(distribution.masses) <= within + (2 * TAIL_SAMPLES + PRIOR_SAMPLES) * (1 + 1e-9)
    assert distribution.longer[0] == sum(sample > 0 for sample in samples)


def test_the_cheapest_plan_for_one_certain_time_rests_and_climbs_just_before_it() -> None:
    distribution = IdleDistribution((0.0, 1000.0, 1001.0, 2000.0), (0.0, 1.0, 0.0), (1, 1, 0, 0))
    strategy = cheapest(distribution, THREE.costs(), climbs=True, guarded=False)
    # The plan climbs rung by rung, so that READY is paid only once PARKED is reached.
    assert strategy.plan() == (Step(0.0, 2), Step(990.0, 1), Step(998.0, 0), Step(1001.0, 2))
    # If the plan may not climb, it costs less to let the call wait on REMOTE than to hold a higher rung.
    assert cheapest(distribution, THREE.costs(), climbs=False, guarded=False).plan() == (Step(0.0, 2),)


def test_a_plan_for_a_timer_rests_low_and_is_ready_a_little_before_the_earliest_call_so_far() -> None:
    costs = Ladder((Rung(1.35e-6, 0), Rung(3e-7, 0.03), Rung(3e-9, 5.8)), wait_per_s=0.01).costs()
    rnd = random.Random(1)
    samples = [1800 * rnd.gauss(1, 0.01) for _ in range(128)]
    plan = cheapest(distribution_of(samples, costs, NO_PRIOR, climbs=True), costs, climbs=True).plan()

    def rung_at(at_s: float) -> int:
        return [step.rung for step in plan if step.offset_s <= at_s][-1]

    earliest_s = min(samples)
    assert [rung_at(at_s) for at_s in (300, 900, 1500)] == [2, 2, 2]
    assert rung_at(earliest_s - 2.0) <= 1


def test_a_plan_that_begins_later_is_the_rest_of_the_same_way() -> None:
    distribution = IdleDistribution((0.0, 1000.0, 1001.0, 2000.0), (0.0, 1.0, 0.0), (1, 1, 0, 0))
    strategy = cheapest(distribution, THREE.costs(), climbs=True, guarded=False)
    assert strategy.plan(400.0) == (Step(0.0, 2), Step(590.0, 1), Step(598.0, 0), Step(601.0, 2))
    # There is no time left to step down and climb again, so the plan stays on READY.
    assert strategy.plan(995.0) == (Step(0.0, 0), Step(6.0, 2))
    assert strategy.plan(5000.0)[-1].rung == 2


def test_without_enough_longer_samples_it_steps_down_no_earlier_than_the_ski_rental_schedule() -> None:
    costs = THREE.costs()
    few, many = ([1.0] * 50 + [500.0] * count for count in (2, 3))
    ski_rental_s = {step.rung: step.offset_s for step in costs.ski_rental}
    guarded = cheapest(distribution_of(few, costs, NO_PRIOR), costs, climbs=False).plan()
    assert all(step.offset_s >= ski_rental_s[step.rung] for step in guarded[1:])
    bold = cheapest(distribution_of(many, costs, NO_PRIOR), costs, climbs=False).plan()
    assert bold[1].offset_s < ski_rental_s[bold[1].rung]


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=60), ladders(), st.booleans(), st.floats(0, 1e6))
def test_plans_are_orderly_and_end_at_the_cheapest_rung(
    samples: list[float], ladder: object, climbs: bool, since_s: float
) -> None:
    costs = ladder.costs()  # type: ignore[attr-defined]
    distribution = distribution_of(samples, costs, NO_PRIOR)
    strategy = cheapest(distribution, costs, climbs=climbs)
    assert strategy == cheapest(distribution, costs, climbs=climbs)
    plan = strategy.plan(since_s)
    assert_orderly(plan, len(costs.holds))
    rungs = [step.rung for step in plan]
    if not climbs:
        assert rungs == sorted(set(rungs))


@given(st.lists(st.floats(0.01, 1e5), min_size=4, max_size=60), ladders())
def test_no_single_timeout_is_cheaper_than_the_cheapest_plan(samples: list[float], ladder: object) -> None:
    costs = ladder.costs()  # type: ignore[attr-defined]
    distribution = distribution_of(samples, costs, NO_PRIOR)
    best = expected_bill(
        distribution, costs, cheapest(distribution, costs, climbs=False, guarded=False).plan()
    )
    for rung in range(len(costs.holds)):
        for edge in distribution.edges:
            plan = (Step(0.0, 0), Step(edge, rung)) if edge else (Step(0.0, rung),)
            # The plan was chosen for arrivals anywhere in a bin. Billing the middle of the bin gives the same cost.
            assert best <= expected_bill(distribution, costs, plan) * (1 + 1e-6) + 1e-9


def test_it_does_not_step_down_just_after_the_longest_gap_between_bursts() -> None:
    costs = THREE.costs()
    mean_s = 0.4 * costs.ski_rental[-1].offset_s
    gaps = [-mean_s * math.log((number + 0.5) / 16) for number in range(16)]
    plan = cheapest(distribution_of([0.1] * 200 + gaps, costs, NO_PRIOR), costs, climbs=False).plan()
    # After a silence of several times the longest gap, the plan no longer expects a call.
    assert max(gaps) * 1.2 < plan[-1].offset_s < max(gaps) * 4


def test_it_leaves_for_good_where_the_long_gaps_are_longer_than_holding_is_worth() -> None:
    costs = THREE.costs()
    mean_s = 4 * costs.ski_rental[-1].offset_s
    gaps = [-mean_s * math.log((number + 0.5) / 16) for number in range(16)]
    plan = cheapest(distribution_of([0.1] * 200 + gaps, costs, NO_PRIOR), costs, climbs=False).plan()
    assert plan[-1].offset_s < costs.ski_rental[-1].offset_s / 2

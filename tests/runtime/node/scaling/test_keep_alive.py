"""The keep-alive policy: what it promises for every history, and what it learns."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.idle_distribution import Prior, cheapest, distribution_of
from pilotflame.runtime.node.scaling.keep_alive import IDLES, INTERVALS, History, choose, learn
from pilotflame.runtime.node.scaling.ladder import BurstWait, Costs, IdlePlan, Ladder, Rung, Step
from pilotflame.runtime.node.scaling.ladder_simulator import BurstWaits, Fixed, Learned, Replay, run
from pilotflame.runtime.node.scaling.route import clamped

from .test_ladder import assert_orderly, ladders

GB = 3e-6
# The rungs of a function that uses an eighth of a device: READY, PARKED, ZYGOTE, LOCAL and REMOTE.
SLICE = Ladder(
    (Rung(1e-4, 0), Rung(3.5 * GB, 0.08), Rung(0.5 * GB, 2.2), Rung(4.5e-8, 7), Rung(0, 12)), wait_per_s=0.001
)
idle_periods = st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e4)), max_size=40)


def once(waits_s: Sequence[float]) -> list[BurstWait]:
    """Return the waits of one wake-up from each rung."""
    return [BurstWait(waited_s, 1) for waited_s in waits_s]


def taught(ladder: Ladder, periods: list[tuple[float, float]], prior: Prior | None = None) -> History:
    history, waits = History(), once([rung.wake_s for rung in ladder.rungs])
    for idle_s, since_s in periods:
        history = learn(history, ladder, idle_s, since_s, waits, prior or Prior())
    return history


def test_a_function_of_which_nothing_is_known_follows_the_ski_rental_schedule() -> None:
    assert choose(History(), SLICE, 5.0).plan == SLICE.costs().ski_rental


def assert_climbs_one_after_the_other(plan: IdlePlan, ladder: Ladder) -> None:
    """Check that each step begins when the previous step has ended, even if a step up takes longer than the stay after it."""
    wakes, reached_s = [rung.wake_s for rung in ladder.rungs], 0.0
    for (_, before), (offset_s, rung) in pairwise(plan):
        assert offset_s >= reached_s
        reached_s = offset_s + max(0.0, wakes[before] - wakes[rung]) - 1e-6


@settings(max_examples=50)
@given(ladders(), st.lists(st.floats(0, 600), min_size=1, max_size=60), st.floats(0, 600))
def test_no_strategy_begins_to_climb_before_it_has_climbed(
    ladder: Ladder, intervals: list[float], since_s: float
) -> None:
    costs = ladder.costs()
    distribution = distribution_of(intervals, costs, Prior().cdf())
    plan = cheapest(distribution, costs, climbs=True, guarded=False).plan(since_s)
    assert_orderly(plan, len(ladder.rungs))
    assert_climbs_one_after_the_other(plan, ladder)


@settings(max_examples=50)
@given(ladders(), idle_periods, st.floats(0, 1e5))
def test_every_plan_is_orderly_and_equal_inputs_give_equal_plans(
    ladder: Ladder, periods: list[tuple[float, float]], since_s: float
) -> None:
    history = taught(ladder, periods)
    plan = choose(history, ladder, since_s).plan
    assert_orderly(plan, len(ladder.rungs))
    assert_climbs_one_after_the_other(plan, ladder)
    assert plan == choose(taught(ladder, periods), ladder, since_s).plan
    assert history.periods == len(periods)
    # The last step goes down, or to the rung that is the cheapest to hold.
    assert len(plan) == 1 or plan[-1].rung > plan[-2].rung or plan[-1].rung == len(ladder.rungs) - 1


@settings(max_examples=20)
@given(ladders(), ladders(), idle_periods, st.floats(0, 1e7))
def test_what_was_planned_for_another_ladder_is_not_looked_at(
    before: Ladder, after: Ladder, periods: list[tuple[float, float]], idle_s: float
) -> None:
    if len(before.rungs) != len(after.rungs):
        history, waits = taught(before, periods), once([0.0] * len(after.rungs))
        assert learn(history, after, idle_s, 0.0, waits).periods == len(periods) + 1
        assert_orderly(choose(history, after, 0.0).plan, len(after.rungs))


def test_the_history_is_bounded() -> None:
    history = taught(SLICE, [(60.0, 1.0)] * (IDLES + 50))
    assert (len(history.idles), len(history.intervals)) == (IDLES, INTERVALS)
    assert history.periods == IDLES + 50


def test_the_gaps_between_forty_bursts_are_known() -> None:
    history = taught(SLICE, ([(0.6, 0.3)] * 24 + [(900.0, 5.0)]) * 40)
    assert sum(idle_s > 10 for idle_s in history.idles) == 40


def test_a_timer_is_prewarmed_just_before_it_fires() -> None:
    rnd = random.Random(1)
    history = taught(SLICE, [(600 + rnd.gauss(0, 2), 0.5) for _ in range(64)])
    assert choose(history, SLICE, 0.5).expert >= 3
    plan = choose(history, SLICE, 0.5).plan
    ready_s = next(step.offset_s for step in plan[1:] if step.rung == 0)
    assert 580 < ready_s < 605
    # The plan rests on ZYGOTE or below before the prewarm, and again half an hour after it.
    assert max(step.rung for step in plan if step.offset_s < 500) >= 2
    assert [step.rung for step in plan if step.offset_s < 2400][-1] >= 2


@settings(max_examples=50)
@given(st.floats(20, 5000), st.floats(0, 0.02))
def test_a_prewarm_never_risks_more_than_it_has_saved(period_s: float, saved: float) -> None:
    rnd = random.Random(1)
    history = taught(SLICE, [(period_s * rnd.gauss(1, 0.01), 0.5) for _ in range(40)])
    history = replace(history, bills=(1, 1, 1, 0.5, 0.6), lasting_bills=(1, 1, 1, 1 - saved, 0))
    assert history.experts is not None
    steady, bold = history.experts.steady[1], history.experts.plan(3, 0.5)
    costs = history.costs(SLICE)
    plans = [clamped(bold, steady, lowest, costs.wakes) for lowest in range(5)]
    affordable = [plan for plan in plans if risk_of(plan, steady, costs) <= 1 - (1 - saved)]
    assert choose(history, SLICE, 0.5) == ((3, affordable[-1]) if affordable else (1, steady))


def risk_of(plan: IdlePlan, steady: IdlePlan, costs: Costs) -> float:
    return max(
        costs.bill(plan, moment) - costs.bill(steady, moment)
        for step in (*plan, *steady)
        for moment in (step.offset_s, step.offset_s * (1 + 1e-9) + 1e-9)
    )


def test_a_prewarm_that_risks_too_much_rests_on_a_higher_rung() -> None:
    """With a timer of 60 s on a CPU, one unexpected call that waits for LOCAL costs more than a hundred rounds save."""
    ladder = Ladder((Rung(0.45 * GB, 0), Rung(0.1 * GB, 0.03), Rung(3e-9, 5.8)), wait_per_s=0.001)
    rnd = random.Random(1)
    history = taught(ladder, [(60 * rnd.gauss(1, 0.005), 0.2) for _ in range(40)])
    choice = choose(history, ladder, 0.2)
    assert choice.expert >= 3
    assert [step.rung for step in choice.plan][:2] == [1, 0]
    assert 50 < choice.plan[1].offset_s < 61


def test_the_distribution_of_all_idle_times_is_followed_unless_another_is_clearly_better() -> None:
    history = taught(SLICE, [(60.0, 1.0)] * 5)
    for bills, expert in (
        ((1, 1, 1, 1, 1), 1), ((0.85, 1, 0.9, 1, 1), 1), ((0.7, 1, 0.75, 1, 1), 0), ((1, 1, 0.7, 1, 1), 2),
        ((0.7, 1, 0.7, 1, 1), 0),
    ):  # fmt: skip
        assert choose(replace(history, bills=bills), SLICE, 1.0).expert == expert


def test_policies_that_do_not_prewarm_only_go_down() -> None:
    rnd = random.Random(1)
    history = taught(SLICE, [(600 + rnd.gauss(0, 2), 0.5) for _ in range(64)])
    for expert, bills in enumerate(((0.5, 1, 1, 1, 1), (1, 1, 1, 1, 1), (1, 1, 0.5, 1, 1))):
        choice = choose(replace(history, bills=bills), SLICE, 0.5)
        assert choice.expert == expert
        assert [step.rung for step in choice.plan] == sorted({step.rung for step in choice.plan})


def test_bursts_are_kept_warm_for_longer_than_single_calls() -> None:
    lonely = taught(SLICE, [(100.0, 1.0)] * 3)
    crowded = History()
    for _ in range(3):
        crowded = learn(crowded, SLICE, 100.0, 1.0, once([0.0, 0.4, 50.0, 300.0, 700.0]))
    assert crowded.costs(SLICE).penalties[2] > 10 * lonely.costs(SLICE).penalties[2]
    assert crowded.costs(SLICE).ski_rental[2].offset_s > lonely.costs(SLICE).ski_rental[2].offset_s


def test_a_call_within_a_burst_begins_no_wake_of_its_own() -> None:
    ladder = Ladder((Rung(0.0008, 0.0), Rung(0.0, 12.0)), 0.01)
    bursts = [3600.0 * burst + 0.3 * call for burst in range(20) for call in range(40)]
    policy = Learned(ladder)
    run(Replay(bursts, 0.2, ladder, policy))
    waited_s = sum(12.0 - 0.3 * call for call in range(40))
    # The learned waits may be shorter: the first burst follows no idle period, so only the rest of it counts as a wake, and
    # the wake time alone counts as a first sample.
    assert policy.history.costs(ladder).penalties[1] > 0.9 * 0.01 * waited_s


def test_waits_of_another_ladder_are_forgotten_and_the_idle_times_are_kept() -> None:
    history = taught(SLICE, [(60.0, 1.0)] * 5)
    shorter = Ladder(SLICE.rungs[:3], SLICE.wait_per_s)
    assert history.costs(shorter) == shorter.costs()
    following = learn(history, shorter, 60.0, 1.0, once([0.0, 0.1, 3.0]))
    assert len(following.waits) == 3
    assert len(following.idles) == 6


def test_a_rhythm_that_changes_is_noticed() -> None:
    before = taught(SLICE, [(20.0, 1.0)] * 200)
    after = taught(SLICE, [(20.0, 1.0)] * 200 + [(5000.0, 1.0)] * 40)
    bills = [SLICE.costs().bill(choose(history, SLICE, 1.0).plan, 5000.0) for history in (before, after)]
    assert bills[1] < bills[0]
    assert bills[1] < 1.3 * min(SLICE.costs().bill((Step(0.0, rung),), 5000.0) for rung in range(5))


def test_the_node_s_prior_helps_a_function_that_is_new() -> None:
    prior = Prior()
    for known in range(200):
        prior = prior.learn(3.0, known // 20)
    informed, alone = taught(SLICE, [(3.0, 1.0)], prior), taught(SLICE, [(3.0, 1.0)])
    bills = [
        SLICE.costs().bill(choose(history, SLICE, 1.0, prior).plan, 3.0) for history in (informed, alone)
    ]
    assert bills[0] <= bills[1]


def test_a_replay_waits_for_the_rung_and_so_do_those_that_come_meanwhile() -> None:
    # READY ends 10 s after the first call. The second call finds REMOTE, the third comes 2 s later, the last during service.
    ladder = Ladder((Rung(1.0, 0.0), Rung(0.0, 5.0)), 1.0)
    plan = (Step(0.0, 0), Step(10.0, 1))
    result = run(Replay([0.0, 100.0, 102.0, 105.5], 1.0, ladder, Fixed(plan)))
    assert (result.requests, result.woken, result.felt) == (4, 1, 2)
    assert result.waited_s == 5 + 3
    assert result.held == 10 + 5
    assert result.periods == [99.0]


def test_an_arrival_in_the_middle_of_a_prewarm_waits_for_its_rest() -> None:
    ladder = Ladder((Rung(1.0, 0.0), Rung(0.0, 5.0)), 1.0)
    plan = (Step(0.0, 1), Step(50.0, 0), Step(100.0, 1))
    result = run(Replay([0.0, 53.0], 1.0, ladder, Fixed(plan)))
    assert (result.waited_s, result.held) == (3.0, 2.0 + 3.0)


def test_a_short_silence_is_no_idle_period_and_the_worker_stays_for_it() -> None:
    ladder = Ladder((Rung(1.0, 0.0), Rung(0.0, 5.0)), 1.0)
    witness = Witness()
    result = run(Replay([0.0, 3.0, 13.0], 1.0, ladder, witness, quiet_s=2.5))
    assert [idle_s for idle_s, _, _ in witness.told] == [9.0]
    assert result.held == 2 + 9
    at_once = (Step(0.0, 1),)
    result = run(Replay([0.0, 3.0, 13.0], 1.0, ladder, Fixed(at_once), quiet_s=2.5))
    assert (result.held, result.waited_s, result.woken) == (2 + 2.5 + 5, 5.0, 1)


class Witness(Fixed):
    """Records the arguments with which a policy learns."""

    def __init__(self) -> None:
        super().__init__((Step(0.0, 0),))
        self.told: list[tuple[float, float, list[BurstWait]]] = []

    def learn(self, idle_s: float, since_s: float, burst_waits: Sequence[BurstWait]) -> None:
        self.told.append((idle_s, since_s, list(burst_waits)))


gaps = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=40)


@given(gaps, st.integers(1, 40))
def test_a_policy_is_told_nothing_of_later_arrivals(following: list[float], known: int) -> None:
    arrivals = list(accumulate(following))
    whole, part = Witness(), Witness()
    run(Replay(arrivals, 0.5, SLICE, whole))
    run(Replay(arrivals[:known], 0.5, SLICE, part))
    assert part.told == whole.told[: len(part.told)]


@given(gaps, st.floats(0.0, 30.0), st.data())
def test_all_who_come_during_a_wake_are_counted_once_they_have_come_and_begin_no_other(
    following: list[float], wake_s: float, data: st.DataObject
) -> None:
    arrivals = list(accumulate(following))
    ending = data.draw(st.lists(st.booleans(), min_size=len(arrivals), max_size=len(arrivals)))
    waits, told = BurstWaits(wake_s), list[BurstWait]()
    for arrival_s, ends_idle in zip(arrivals, ending, strict=True):
        waits.arrive(arrival_s, ends_idle=ends_idle)
        told.append(waits.take())
    begun = -math.inf
    for arrival_s, ends_idle, found in zip(arrivals, ending, told, strict=True):
        begins = ends_idle and arrival_s >= begun + wake_s
        begun = arrival_s if begins else begun
        assert found.wakes == begins
        assert found.waited_s == pytest.approx(max(0.0, begun + wake_s - arrival_s))


def test_the_first_interval_begins_with_the_first_arrival() -> None:
    witness = Witness()
    run(Replay([1000.0, 1060.0], 1.0, SLICE, witness))
    assert [(idle_s, since_s) for idle_s, since_s, _ in witness.told] == [(59.0, 1.0)]


def test_a_step_up_in_the_middle_of_another_begins_when_that_has_ended() -> None:
    ladder = Ladder((Rung(1.0, 0.0), Rung(0.5, 2.0), Rung(0.0, 10.0)), 1.0)
    plan = (Step(0.0, 2), Step(50.0, 1), Step(55.0, 0))
    # PARKED is reached after 58 s, READY after 60 s.
    for idle_s, waited_s in ((52.0, 8.0), (57.0, 3.0), (60.0, 0.0)):
        assert run(Replay([0.0, 1.0 + idle_s], 1.0, ladder, Fixed(plan))).waited_s == waited_s


def test_a_replay_completes_no_prewarm_by_a_repeated_step() -> None:
    ladder = Ladder((Rung(1.0, 0.0), Rung(0.5, 2.0), Rung(0.0, 10.0)), 1.0)
    plan = (Step(0.0, 2), Step(50.0, 0), Step(51.0, 0))
    assert run(Replay([0.0, 1.0 + 53.0], 1.0, ladder, Fixed(plan))).waited_s == 7.0


def test_the_policy_is_never_much_dearer_than_ski_rental_and_much_cheaper_for_a_timer() -> None:
    rnd = random.Random(7)
    timer = [600.0 * number + rnd.gauss(0, 5) for number in range(1, 300)]
    callers = [60.0]
    for _ in range(600):
        callers.append(callers[-1] + rnd.paretovariate(1.1) * 5)
    for arrivals, most in ((timer, 0.5), (callers, 1.15)):
        learned = run(Replay(arrivals, 0.2, SLICE, Learned(SLICE))).bill(SLICE.wait_per_s)
        ski_rental = run(Replay(arrivals, 0.2, SLICE, Fixed(SLICE.costs().ski_rental))).bill(SLICE.wait_per_s)
        assert learned <= most * ski_rental

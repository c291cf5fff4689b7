"""Where idle periods begin and end, the steps of a plan, and the callers that would have waited for a wake-up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.idle_period import QUIET_S, Followers, IdlePeriod, IdleWatch
from pilotflame.runtime.node.scaling.ladder import Step

PLAN = (Step(0.0, 0), Step(10.0, 1), Step(30.0, 2), Step(50.0, 0), Step(60.0, 2))
# Requests, one after the other: the seconds without work before the request, and the seconds for which it runs.
requests = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=30)


@given(requests, st.booleans())
def test_the_periods_are_the_gaps_that_are_longer_than_the_quiet(
    calls: list[tuple[float, float]], workers_stay: bool
) -> None:
    watch, now_s, found = IdleWatch(), 0.0, list[tuple[float, float]]()
    woken_s, expected, end_s = None, list[tuple[float, float]](), None
    for gap_s, run_s in calls:
        arrival_s = now_s + gap_s
        if end_s is not None and gap_s > QUIET_S + 1e-6:
            expected.append((gap_s, end_s - (end_s if woken_s is None else woken_s)))
            woken_s = arrival_s
        # Call `quiet` as the revision does: at the end of a request, and again at the time that `quiet` has returned.
        due_s = watch.quiet(now_s, now_s if workers_stay else None) if end_s is not None else None
        while due_s is not None and due_s < arrival_s:
            due_s = watch.quiet(due_s, end_s if workers_stay else None)
        if (ended := watch.busy(arrival_s)) is not None:
            assert not ended.begun_s > arrival_s - QUIET_S + 1e-6
            found.append((arrival_s - ended.begun_s, ended.since_s))
        assert watch.busy(arrival_s) is None
        now_s = end_s = arrival_s + run_s
    assert [pytest.approx(one, abs=1e-6) for one in expected] == [
        one for one in found if one[0] > QUIET_S + 1e-6
    ]


def test_later_requests_that_were_not_seen_move_the_beginning() -> None:
    watch = IdleWatch()
    assert watch.quiet(10.0, 10.0) == 10.0 + QUIET_S
    assert watch.quiet(10.5, 10.4) == 10.4 + QUIET_S
    assert watch.quiet(10.4 + QUIET_S, 10.4) is None
    assert watch.period == IdlePeriod(10.4, 0.0, 10.4)


def test_a_function_that_fails_is_not_idle() -> None:
    watch = IdleWatch()
    watch.open(0.0, 0.0)
    watch.interrupt()
    assert watch.period is None
    assert watch.busy(5.0) is None
    assert watch.quiet(100.0, None) == 100.0 + QUIET_S


@given(st.floats(0, 100))
def test_a_period_stands_where_its_plan_says(after_s: float) -> None:
    period = IdlePeriod(5.0, 0.0, 7.0)
    expected = [step.rung for step in PLAN if step.offset_s <= after_s][-1]
    assert period.rung(PLAN, 7.0 + after_s) == expected
    left = list(period.later(PLAN, 7.0 + after_s))
    assert [step.rung for step in left] == [step.rung for step in PLAN if step.offset_s > after_s]
    assert all(step.offset_s > 7.0 + after_s for step in left)


def test_steps_that_are_due_after_a_month_are_never_taken() -> None:
    assert list(IdlePeriod(0.0, 0.0, 0.0).later((Step(0.0, 0), Step(1e9, 1), Step(math.inf, 2)), 1.0)) == []


def test_before_its_time_a_plan_stands_on_its_first_rung() -> None:
    assert IdlePeriod(5.0, 0.0, 7.0).rung(PLAN, 6.0) == 0


@given(st.lists(st.floats(1e-3, 15), max_size=40), st.lists(st.floats(0.01, 20), max_size=3))
def test_followers_wait_for_the_rest_of_each_wake(delays_s: list[float], wakes: list[float]) -> None:
    wakes_s = [0.0, *sorted(wakes)]
    followers = Followers(100.0, wakes_s)
    # The last two arrivals must not count as followers. 99.9 is the first arrival, a moment before the look that it caused, and
    # 90.0 belongs to the last period.
    arrivals_s = [*(100.0 + delay_s for delay_s in delays_s), 99.9, 90.0]
    for wake_s, found in zip(wakes_s, followers.waits(wakes_s, arrivals_s), strict=True):
        waits_s = [max(0.0, wake_s - delay_s) for delay_s in (0.0, *delays_s)]
        assert found.waited_s == pytest.approx(sum(waits_s), abs=1e-9)
    assert followers.until_s == 100.0 + max(wakes_s)


def test_an_arrival_that_was_not_seen_waits_alone_for_the_wake_time() -> None:
    wakes_s = [0.0, 0.03, 6.0]
    waits = Followers(100.0, wakes_s).waits(wakes_s, ())
    assert [one.waited_s for one in waits] == pytest.approx(wakes_s)


def test_no_wake_begins_while_another_one_is_under_way() -> None:
    wakes_s = [0.0, 2.0, 10.0]
    first = Followers(100.0, wakes_s)
    second = Followers(105.0, wakes_s, first)
    third = Followers(110.0, wakes_s, second)
    assert [[one.wakes for one in each.waits(wakes_s, ())] for each in (first, second, third)] == [
        [1, 1, 1], [1, 1, 0], [1, 1, 1]
    ]  # fmt: skip
    assert second.waits(wakes_s, ())[2].waited_s == 0.0


def test_followers_of_another_ladder_begin_all_wakes() -> None:
    after = Followers(101.0, [0.0, 5.0], Followers(100.0, [0.0, 2.0, 10.0]))
    assert [one.wakes for one in after.waits([0.0, 5.0], ())] == [1, 1]
    assert [one.wakes for one in after.waits([0.0, 2.0, 10.0], ())] == [1, 1, 1]

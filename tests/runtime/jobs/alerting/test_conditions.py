"""When conditions of alerts begin and end: the window of errors, the pause between messages, and what a restart keeps."""

from __future__ import annotations

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.alerting.conditions import (
    SLICES,
    Condition,
    ErrorShare,
    ReportedStart,
    SlowColdStart,
)

CALLS = st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=60)


def run(condition: ErrorShare, calls: list[tuple[float, bool]]) -> list[tuple[float, bool]]:
    """Note the calls, and look at the condition after each call and at each `due_s`, as a timer would. Return (time, begun) of each
    change.
    """
    now_s, changes = 0.0, []

    def look() -> None:
        if condition.changed(now_s):
            changes.append((now_s, condition.begun))

    for pause_s, failed in calls:
        call_s = now_s + pause_s
        while (due_s := condition.due_s(now_s)) <= call_s:
            assert due_s > now_s
            now_s = due_s
            look()
        now_s = call_s
        condition.note(now_s, failed=failed)
        look()
    while (due_s := condition.due_s(now_s)) < math.inf:
        assert due_s > now_s
        now_s = due_s
        look()
    return changes


@given(CALLS, st.sampled_from([0.1, 0.5, 1.0]), st.integers(1, 5), st.sampled_from([0.0, 7.0, 500.0]))
def test_changes_alternate_with_a_pause_and_every_alert_ends(
    calls: list[tuple[float, bool]], limit: float, min_calls: int, pause_s: float
) -> None:
    condition = ErrorShare(pause_s, limit=limit, window_s=60.0, min_calls=min_calls)
    changes = run(condition, calls)
    assert [begun for _, begun in changes] == [index % 2 == 0 for index in range(len(changes))]
    assert all(later - sooner >= pause_s - 1e-6 for (sooner, _), (later, _) in pairwise(changes))
    # `run` goes on until the window has no calls, so the last alert must have ended.
    assert not condition.begun


@given(CALLS)
def test_the_window_holds_the_calls_of_its_time(calls: list[tuple[float, bool]]) -> None:
    condition, now_s, seen = ErrorShare(0.0, window_s=60.0), 0.0, list[tuple[float, bool]]()
    for pause_s, failed in calls:
        now_s += pause_s
        seen.append((now_s, failed))
        condition.note(now_s, failed=failed)
        least = [one for at_s, one in seen if at_s > now_s - 60.0]
        most = [one for at_s, one in seen if at_s > now_s - 60.0 * (1 + 1 / SLICES)]
        assert len(least) <= condition.calls <= len(most)
        assert sum(least) <= condition.errors <= sum(most)
        assert len(condition._slices) <= SLICES + 2


def test_a_beginning_needs_calls_enough() -> None:
    condition = ErrorShare(0.0, min_calls=3)
    for _ in range(2):
        condition.note(1.0, failed=True)
        assert not condition.changed(1.0)
    condition.note(1.0, failed=True)
    assert condition.changed(1.0)


def test_an_alert_of_before_a_restart_ends_when_the_window_has_passed() -> None:
    condition = ErrorShare(0.0, begun=True, window_s=60.0, quiet_until_s=160.0)
    assert not condition.changed(100.0)
    assert condition.due_s(100.0) == 160.0
    assert condition.changed(160.0)
    assert not condition.begun


def test_a_change_that_was_not_stored_is_repeated_after_the_pause() -> None:
    condition: Condition = SlowColdStart(10.0, limit_ms=5.0)
    assert isinstance(condition, SlowColdStart)
    condition.note(ReportedStart(0.5, 9.0, "q1"))
    assert condition.changed(1.0)
    condition.not_sent()
    assert not condition.changed(2.0)
    assert condition.due_s(2.0) == 11.0
    assert condition.changed(11.0)
    assert condition.begun


def test_a_fast_cold_start_ends_the_alert_of_a_slow_one() -> None:
    condition = SlowColdStart(0.0, begun=True, limit_ms=5.0)
    assert not condition.changed(1.0)
    condition.note(ReportedStart(1.5, 4.0, "q1"))
    assert condition.changed(2.0)
    assert (condition.begun, condition.due_s(2.0)) == (False, math.inf)


def test_a_share_counts_the_calls_of_all_gateways() -> None:
    here, there = ErrorShare(0.0, min_calls=3), ErrorShare(0.0, min_calls=3)
    here.note(1.0, failed=True)
    for _ in range(2):
        there.note(51.0, failed=True)
    here.hear(2.0, [there.report(51.0), (0, 0, "a figure of a newer version")])
    assert here.changed(2.0)
    assert (here.figures()["calls"], here.figures()["errors"]) == (3, 3)
    # A report has the calls of its own gateway alone.
    assert here.report(2.0) == (1, 1)
    assert there.report(1e9) == ()
    here.hear(3.0, [])
    assert here.figures()["calls"] == 1


def test_the_latest_cold_start_of_all_gateways_decides() -> None:
    here, there = SlowColdStart(0.0, limit_ms=5.0), SlowColdStart(0.0, limit_ms=5.0)
    assert there.report(1.0) == ()
    here.note(ReportedStart(10.0, 4.0, "q1"))
    there.note(ReportedStart(1000.0, 9.0, "q2"))
    here.hear(20.0, [there.report(1015.0)])
    assert not here.holds(20.0)
    here.hear(20.0, [there.report(1002.0)])
    assert here.changed(20.0)
    assert here.figures() == {"value": 9.0, "limit": 5.0, "request_id": "q2"}
    # Without newer reports, the cold start of the other gateway stays the latest.
    here.hear(2000.0, [])
    assert here.holds(2000.0)
    assert there.report(2000.0) == ()

"""The load that lasts, compared with the mean over all moments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.recent_load import LASTING_S, MARKS, QUEUED_CALL, RecentLoad

TICK_S = 0.05


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 9)), min_size=1, max_size=20), st.integers(0, 5_000)
)
def test_the_mean_of_what_runs(steps: list[tuple[int, int]], quiet: int) -> None:
    """Each step is a number of ticks and the number of invocations that run during these ticks."""
    load, in_flight_s, now_s, runs = RecentLoad(), 0.0, float(quiet), list[int]()
    load.note(now_s, 0.0, 0, 0, 0)
    lasting = 0.0
    for ticks, running in steps:
        for _ in range(ticks):
            now_s += TICK_S
            in_flight_s += running * TICK_S
            runs.append(running)
            lasting = load.note(now_s, in_flight_s, 0, 0, 0)
    true = sum(runs[-round(LASTING_S / TICK_S) :]) * TICK_S / LASTING_S
    # The beginning of the window is known only to the precision of one mark.
    assert lasting == pytest.approx(true, abs=9 / MARKS + 0.1)


def test_a_load_that_nobody_looked_at_counts_as_constant() -> None:
    load = RecentLoad()
    load.note(0.0, 0.0, 0, 0, 0)
    assert load.note(100.0, 50.0, 0, 0, 0) == pytest.approx(0.5)
    # The load of 2 began at the last look.
    assert load.note(101.0, 52.0, 0, 0, 0) == pytest.approx((5 * 0.5 + 2) / 6)


def noted(queue: list[int], *, admitted_each: int, emptied_at: int = -1) -> float:
    """Return the lasting load after `queue`, which has the number of waiting invocations for each half second."""
    load, lasting = RecentLoad(), 0.0
    load.note(0.0, 0.0, 0, 0, 0)
    for step, queued in enumerate(queue, start=1):
        lasting = load.note(step / 2, 0.0, queued, step * admitted_each, int(0 <= emptied_at < step))
    return lasting


def test_a_queue_lasts_if_it_was_never_shorter_and_others_come() -> None:
    assert noted([9] * 20, admitted_each=1) == 9
    assert noted([9] * 10, admitted_each=1) == QUEUED_CALL
    assert noted([9] * 15 + [3, 9, 9, 9, 9], admitted_each=1) == 3
    assert noted([9] * 20, admitted_each=1, emptied_at=15) == QUEUED_CALL


def test_a_burst_that_drains_does_not_last() -> None:
    assert noted(list(range(200, 100, -1)), admitted_each=0) == 0

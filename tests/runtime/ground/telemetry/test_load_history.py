"""The series of a function's load: it has a limited number of samples, and shows the largest numbers and the last state."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.telemetry.load_history import (
    BUCKET_S,
    MAX_ARRIVALS,
    MAX_SAMPLES,
    Arrivals,
    LoadSeries,
    LoadState,
)
from pilotflame.runtime.ground.telemetry.rung_name import RungName

STATES = st.builds(
    LoadState,
    *[st.integers(0, 9)] * 4,
    rung=st.sampled_from([RungName.READY, RungName.ZYGOTE, RungName.LOCAL]),
)
NOTES = st.lists(st.tuples(st.floats(0, 3), STATES), min_size=1, max_size=40)


@given(NOTES)
def test_the_series_shows_the_largest_numbers_and_the_last_state(
    notes: list[tuple[float, LoadState]],
) -> None:
    series, now_s = LoadSeries(), 100.0
    for wait_s, state in notes:
        now_s += wait_s
        series.note(now_s, state)
    samples = series.take(now_s + 0.5)
    states = [state for _, state in notes]
    assert max(one.queued for one in samples) == max(state.queued for state in states)
    assert max(one.in_flight for one in samples) == max(state.in_flight for state in states)
    # The two numbers of workers in a sample are of the same moment.
    assert max(one.starting + one.ready for one in samples) == max(one.starting + one.ready for one in states)
    assert {one[3:5] for one in samples} <= {state[2:4] for state in states} | {(0, 0)}
    assert samples[-1][1:6] == (*notes[-1][1][:4], notes[-1][1].rung.value)
    times = [one.at for one in samples]
    assert times == sorted(times)
    # A second has two rows at most: its largest numbers, and the numbers at its end if they were lower.
    assert len(samples) <= 2 * ((now_s - 100.0) / BUCKET_S + 1)
    assert series.take(now_s + 10) == []


@given(
    st.lists(st.tuples(st.floats(0, 3), STATES | st.sampled_from(["queued", "cold", "take"])), max_size=40)
)
def test_a_series_from_which_only_what_is_pending_is_taken_has_the_same_samples(
    events: list[tuple[float, LoadState | str]],
) -> None:
    found = list[list[tuple[object, ...]]]()
    for lazy in (False, True):
        series, now_s, samples = LoadSeries(), 100.0, list[tuple[object, ...]]()
        for wait_s, event in [*events, (5.0, "take"), (5.0, "take")]:
            now_s += wait_s
            if isinstance(event, LoadState):
                series.note(now_s, event)
            elif event == "queued":
                series.note_queued(now_s, 3)
            elif event == "cold":
                series.note_cold(now_s, 0.5)
            elif series.pending or not lazy:
                samples += [one[1:] for one in series.take(now_s)]
        found.append(samples)
    assert found[0] == found[1]


def test_an_unchanged_state_adds_nothing_and_a_fall_within_a_second_ends_with_it() -> None:
    series, busy, idle = (
        LoadSeries(),
        LoadState(3, 4, 0, 1, RungName.READY),
        LoadState(0, 0, 0, 1, RungName.READY),
    )
    series.note(10.0, busy)
    series.note(10.2, idle)
    for second in range(11, 500):
        series.note(float(second), idle)
    first, second = series.take(500.0)
    assert (first.queued, second.queued) == (3, 0)
    assert 0.99 < second.at - first.at < 1.01
    assert abs(first.at - (time.time() - time.monotonic() + 10.0)) < 1


def test_cold_starts_count_in_their_second() -> None:
    series = LoadSeries()
    series.note(10.0, LoadState(0, 0, 0, 1, RungName.READY))
    assert series.take(20.0)
    series.note_cold(30.0, 0.2)
    series.note_cold(30.5, 0.5)
    series.note_cold(33.0, 0.1)
    assert [(one.cold, one.slowest_cold_s) for one in series.take(33.1)] == [(2, 0.5), (1, 0.1)]


def test_what_waits_is_bounded_and_arrivals_are_unix_times() -> None:
    series, arrivals = LoadSeries(), Arrivals()
    for number in range(MAX_SAMPLES + 10):
        series.note(float(number), LoadState(number, 0, 0, 0, RungName.LOCAL))
    assert len(series.take(1e9)) == MAX_SAMPLES
    for _ in range(MAX_ARRIVALS + 10):
        arrivals.note(time.monotonic())
    taken = arrivals.take()
    assert len(taken) == MAX_ARRIVALS
    assert abs(taken[-1] - time.time()) < 5
    assert not arrivals.take()

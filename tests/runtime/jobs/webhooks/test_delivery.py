"""A webhook delivery: the pauses between its attempts, for any schedule."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.webhooks.delivery import (
    MAX_RETRY_AFTER_S,
    DeliveryAttempt,
    DeliveryState,
    RetrySchedule,
)

SCHEDULES = st.builds(
    RetrySchedule,
    tries=st.integers(1, 30),
    first_s=st.floats(0.001, 1e4),
    factor=st.floats(1.0, 10.0),
    max_s=st.floats(0.001, 1e6),
)
DRAWS = st.floats(0.0, 1.0)


def pause(schedule: RetrySchedule, tried: int, draw: float = 1.0, asked_s: float = 0.0) -> float | None:
    """Return the pause after the failed attempt number `tried`; None if it was the last one."""
    failed = DeliveryAttempt(0.0, 503, "", 1, wish_s=asked_s)
    state, next_s = replace(schedule, draw=lambda: draw).next_state(failed, tried, 0.0)
    assert state is (DeliveryState.DEAD if tried >= schedule.tries else DeliveryState.PENDING)
    return None if state is DeliveryState.DEAD else next_s


@given(SCHEDULES, st.integers(1, 40), DRAWS, st.floats(0.0, 1e9))
def test_a_pause_is_between_zero_and_its_bound(
    schedule: RetrySchedule, tried: int, draw: float, asked_s: float
) -> None:
    drawn, bound_s = pause(schedule, tried, draw), pause(schedule, tried)
    longer = pause(schedule, tried, draw, asked_s)
    if drawn is not None and bound_s is not None and longer is not None:
        assert 0 <= drawn <= bound_s <= schedule.max_s
        assert min(asked_s, MAX_RETRY_AFTER_S) <= longer <= max(drawn, MAX_RETRY_AFTER_S)


@given(SCHEDULES, st.integers(1, 40), DRAWS, DRAWS)
def test_bounds_never_shrink_and_the_draw_covers_them(
    schedule: RetrySchedule, tried: int, one: float, other: float
) -> None:
    if tried < schedule.tries - 1:
        assert (pause(schedule, tried) or 0) <= (pause(schedule, tried + 1) or 0)
    if tried < schedule.tries:
        assert pause(schedule, tried, 0.0) == 0.0
        low, high = sorted((one, other))
        assert (pause(schedule, tried, low) or 0) <= (pause(schedule, tried, high) or 0)


def test_the_default_tries_at_least_twelve_times_over_about_a_day() -> None:
    default = RetrySchedule()
    assert default.tries >= 12
    mean_h = sum(pause(default, tried, 0.5) or 0 for tried in range(1, default.tries)) / 3600
    assert 20 < mean_h < 30


def test_the_pause_is_random() -> None:
    failed = DeliveryAttempt(0.0, 503, "", 1)
    pauses = {RetrySchedule().next_state(failed, 3, 0.0)[1] for _ in range(20)}
    assert len(pauses) > 1

"""A webhook delivery: the pauses between its attempts, for any schedule."""

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.webhook_delivery import MAX_RETRY_AFTER_S, RetrySchedule

SCHEDULES = st.builds(
    RetrySchedule,
    tries=st.integers(1, 30),
    first_s=st.floats(0.001, 1e4),
    factor=st.floats(1.0, 10.0),
    max_s=st.floats(0.001, 1e6),
)
DRAWS = st.floats(0.0, 1.0)


@given(SCHEDULES, st.integers(1, 40), DRAWS, st.floats(0.0, 1e9))
def test_a_pause_is_between_zero_and_its_bound(
    schedule: RetrySchedule, tried: int, draw: float, asked_s: float
) -> None:
    pause = schedule.pause_s(tried, draw)
    assert (pause is None) == (tried >= schedule.tries)
    if pause is not None:
        assert 0 <= pause <= schedule.bound_s(tried) <= schedule.max_s
        longer = schedule.pause_s(tried, draw, retry_after_s=asked_s)
        assert longer is not None
        assert min(asked_s, MAX_RETRY_AFTER_S) <= longer <= max(pause, MAX_RETRY_AFTER_S)


@given(SCHEDULES, st.integers(1, 40), DRAWS, DRAWS)
def test_bounds_never_shrink_and_the_draw_covers_them(
    schedule: RetrySchedule, tried: int, one: float, other: float
) -> None:
    assert schedule.bound_s(tried) <= schedule.bound_s(tried + 1)
    if tried < schedule.tries:
        assert schedule.pause_s(tried, 0.0) == 0.0
        assert schedule.pause_s(tried, 1.0) == schedule.bound_s(tried)
        low, high = sorted((one, other))
        assert (schedule.pause_s(tried, low) or 0) <= (schedule.pause_s(tried, high) or 0)


def test_the_default_tries_at_least_twelve_times_over_about_a_day() -> None:
    default = RetrySchedule()
    assert default.tries >= 12
    mean_h = sum(default.bound_s(tried) for tried in range(1, default.tries)) / 2 / 3600
    assert 20 < mean_h < 30

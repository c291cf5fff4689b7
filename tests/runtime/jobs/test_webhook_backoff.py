"""Back-off: how long between tries, for any schedule, and what Retry-After asks for."""

from email.utils import formatdate

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.jobs.webhook_backoff import LONGEST_WISH_S, Schedule, wish_s

SCHEDULES = st.builds(
    Schedule,
    tries=st.integers(1, 30),
    first_s=st.floats(0.001, 1e4),
    factor=st.floats(1.0, 10.0),
    longest_s=st.floats(0.001, 1e6),
)
CHANCES = st.floats(0.0, 1.0)


@given(SCHEDULES, st.integers(1, 40), CHANCES, st.floats(0.0, 1e9))
def test_a_pause_lies_between_nothing_and_its_bound(
    schedule: Schedule, tried: int, chance: float, wish: float
) -> None:
    pause = schedule.pause_s(tried, chance)
    assert (pause is None) == (tried >= schedule.tries)
    if pause is not None:
        assert 0 <= pause <= schedule.bound_s(tried) <= schedule.longest_s
        wished = schedule.pause_s(tried, chance, wish_s=wish)
        assert wished is not None
        assert min(wish, LONGEST_WISH_S) <= wished <= max(pause, LONGEST_WISH_S)


@given(SCHEDULES, st.integers(1, 40), CHANCES, CHANCES)
def test_bounds_never_shrink_and_the_draw_is_over_all_of_it(
    schedule: Schedule, tried: int, one: float, other: float
) -> None:
    assert schedule.bound_s(tried) <= schedule.bound_s(tried + 1)
    if tried < schedule.tries:
        assert schedule.pause_s(tried, 0.0) == 0.0
        assert schedule.pause_s(tried, 1.0) == schedule.bound_s(tried)
        low, high = sorted((one, other))
        assert (schedule.pause_s(tried, low) or 0) <= (schedule.pause_s(tried, high) or 0)


def test_the_usual_one_tries_at_least_twelve_times_over_about_a_day() -> None:
    usual = Schedule()
    assert usual.tries >= 12
    mean_h = sum(usual.bound_s(tried) for tried in range(1, usual.tries)) / 2 / 3600
    assert 20 < mean_h < 30


def test_retry_after_in_seconds_and_as_a_date() -> None:
    assert wish_s("120", 1000.0) == 120
    assert wish_s(" 7 ", 1000.0) == 7
    assert wish_s(formatdate(1060, usegmt=True), 1000.0) == 60
    assert wish_s(formatdate(1060), 1000.0) == 60  # "-0000"
    assert wish_s(formatdate(900, usegmt=True), 1000.0) == 0
    for nonsense in ("", "-5", "soon", "1.5", "Mon, 99 Foo", "９"):
        assert wish_s(nonsense, 1000.0) == 0


@given(
    st.text(max_size=40)
    | st.from_regex(r"[A-Z][a-z]{2}, [0-9]{1,9} Jan [0-9]{1,9} [0-9:]{1,12} ?[A-Z+0-9]{0,6}")
)
def test_no_header_breaks_it(text: str) -> None:
    assert wish_s(text, 1000.0) >= 0

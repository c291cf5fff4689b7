"""The advance: a pure policy."""

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.batching.prefetch import MAX_PREFETCH, PREFETCH_S, window


@given(st.integers(1, 4096), st.none() | st.floats(0, 100))
def test_a_window_holds_what_can_run_and_a_bounded_advance(slots: int, exec_s: float | None) -> None:
    advance = window(slots, exec_s) - slots
    assert 0 <= advance <= MAX_PREFETCH
    assert advance & (advance - 1) == 0  # a power of two, or none
    if exec_s is None or exec_s >= PREFETCH_S:
        assert advance == 0


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0, 1))
def test_shorter_calls_never_get_less_in_advance(slots: int, one: float, other: float) -> None:
    assert window(slots, min(one, other)) >= window(slots, max(one, other))

"""The prefetch window."""

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.calls.batching.prefetch import MAX_PREFETCH, PREFETCH_S, window


@given(st.integers(1, 4096), st.none() | st.floats(0, 100))
def test_a_window_holds_what_can_run_and_a_bounded_prefetch(slots: int, exec_s: float | None) -> None:
    prefetched = window(slots, exec_s) - slots
    assert 0 <= prefetched <= MAX_PREFETCH
    # The prefetch is a power of two, or 0.
    assert prefetched & (prefetched - 1) == 0
    if exec_s is None or exec_s >= PREFETCH_S:
        assert prefetched == 0


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0, 1))
def test_shorter_calls_are_never_prefetched_less(slots: int, one: float, other: float) -> None:
    assert window(slots, min(one, other)) >= window(slots, max(one, other))

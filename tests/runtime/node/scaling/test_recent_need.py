"""The recent need: the largest number of workers in a window, compared with a complete record."""

import math

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.recent_need import RecentNeed


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=60),
    st.integers(0, 40),
    st.integers(0, 30),
)
def test_the_largest_of_the_window_and_when_it_ends(
    steps: list[tuple[int, int]], window_s: int, later_s: int
) -> None:
    recent, noted, now_s = RecentNeed(), list[tuple[int, int]](), 0
    for gap_s, workers in steps:
        now_s += gap_s
        recent.note(now_s, workers)
        noted.append((now_s, workers))
    now_s += later_s
    inside = [(at_s, workers) for at_s, workers in noted if workers and at_s + window_s > now_s]
    peak, until_s = recent.peak(now_s, window_s)
    assert peak == max((workers for _, workers in inside), default=0)
    # If the window has no workers, there is no later end.
    assert until_s == max((at_s + window_s for at_s, workers in inside if workers == peak), default=math.inf)

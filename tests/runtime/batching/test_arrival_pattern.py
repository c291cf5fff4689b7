"""The returns: how many follow the end of a group, and how soon."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.batching.arrival_pattern import STEP, STEPS, ArrivalPattern


@given(st.lists(st.floats(0, 0.1), max_size=30), st.integers(1, 64), st.floats(1e-3, 0.1))
def test_what_is_learned_of_one_group_is_what_came_after_it(
    offsets: list[float], size: int, saved_s: float
) -> None:
    returns = ArrivalPattern()
    returns.ended(100.0, size, saved_s)
    assert returns.expected() == []
    arrived = [100.0 + offset for offset in sorted(offsets)]
    for now_s in arrived:
        returns.arrived(now_s)
    returns.ended(101.0, size, saved_s)
    counted = arrived[: 4 * size + 16]
    steps = [(step + 1) * STEP * saved_s for step in range(STEPS)]
    assert returns.expected() == [sum(now_s - 100.0 <= step_s for now_s in counted) for step_s in steps]
    assert returns.ended_s == 101.0


def test_groups_of_other_sizes_have_means_of_their_own_that_follow_slowly() -> None:
    returns = ArrivalPattern()
    for size, came in ((1, 1), (32, 20), (1, 0), (32, 30)):
        returns.ended(10.0, size, 0.02)
        for _ in range(came):
            returns.arrived(10.0)
    returns.ended(11.0, 1, 0.02)
    assert returns.expected()[-1] == pytest.approx(0.8)
    returns.ended(12.0, 30, 0.02)
    assert returns.expected()[-1] == pytest.approx(22.0)


def test_nothing_is_learned_where_joining_saves_nothing() -> None:
    returns = ArrivalPattern()
    returns.arrived(1.0)
    returns.ended(2.0, 4, 0.0)
    returns.arrived(2.0)
    returns.ended(3.0, 4, 0.0)
    assert returns.expected() == []

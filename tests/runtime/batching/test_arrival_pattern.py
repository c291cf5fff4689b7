"""The arrival pattern: how many arrivals follow the end of a batch, and how soon."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.batching.arrival_pattern import STEP, STEPS, ArrivalPattern


@given(st.lists(st.floats(0, 0.1), max_size=30), st.integers(1, 64), st.floats(1e-3, 0.1))
def test_what_is_learned_of_one_batch_is_what_arrived_after_it(
    offsets: list[float], size: int, saved_s: float
) -> None:
    pattern = ArrivalPattern()
    pattern.observe_end(100.0, size, saved_s)
    assert pattern.expected() == []
    arrived = [100.0 + offset for offset in sorted(offsets)]
    for now_s in arrived:
        pattern.observe_arrival(now_s)
    pattern.observe_end(101.0, size, saved_s)
    counted = arrived[: 4 * size + 16]
    steps = [(step + 1) * STEP * saved_s for step in range(STEPS)]
    assert pattern.expected() == [sum(now_s - 100.0 <= step_s for now_s in counted) for step_s in steps]
    assert pattern.ended_s == 101.0


def test_each_octave_of_sizes_has_its_own_means_that_follow_slowly() -> None:
    pattern = ArrivalPattern()
    for size, came in ((1, 1), (32, 20), (1, 0), (32, 30)):
        pattern.observe_end(10.0, size, 0.02)
        for _ in range(came):
            pattern.observe_arrival(10.0)
    pattern.observe_end(11.0, 1, 0.02)
    assert pattern.expected()[-1] == pytest.approx(0.8)
    pattern.observe_end(12.0, 30, 0.02)
    assert pattern.expected()[-1] == pytest.approx(22.0)


def test_nothing_is_learned_where_merging_saves_nothing() -> None:
    pattern = ArrivalPattern()
    pattern.observe_arrival(1.0)
    pattern.observe_end(2.0, 4, 0.0)
    pattern.observe_arrival(2.0)
    pattern.observe_end(3.0, 4, 0.0)
    assert pattern.expected() == []

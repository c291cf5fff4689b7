"""Waiting for more items is bounded by what it can save and by deadlines, and happens only where it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.batching.arrival_pattern import ArrivalPattern
from pilotflame.runtime.batching.batch_forming import Situation, saving, too_late, wait_until
from pilotflame.runtime.batching.latency_curve import LatencyCurve, Point


def affine(fixed_s: float, each_s: float) -> LatencyCurve:
    return LatencyCurve(
        Point(n, fixed_s + n * each_s, 1.1 * (fixed_s + n * each_s)) for n in (1, 2, 4, 8, 16, 32)
    )


def learned(curve: LatencyCurve, size: int, offsets: list[float]) -> ArrivalPattern:
    """Return a pattern where each batch of `size` was followed by arrivals at these offsets; the last ended at 100."""
    pattern = ArrivalPattern()
    for ended_s in (98.0, 99.0, 100.0):
        pattern.observe_end(ended_s, size, saving(curve))
        if ended_s < 100:
            for offset in sorted(offsets):
                pattern.observe_arrival(ended_s + offset)
    return pattern


@given(
    st.floats(0, 0.05), st.floats(0, 0.02), st.integers(1, 40), st.integers(1, 32), st.floats(0, 0.1),
    st.floats(-0.1, 0.2), st.lists(st.floats(0, 0.1), max_size=40),
)  # fmt: skip
def test_it_never_waits_beyond_the_slack_nor_three_quarters_of_the_saving(
    fixed_s: float, each_s: float, queued: int, limit: int, elapsed_s: float, slack_s: float, offsets: list[float]
) -> None:  # fmt: skip
    curve = affine(fixed_s, each_s)
    pattern = learned(curve, 8, offsets)
    now_s = 100.0 + elapsed_s
    until_s = wait_until(Situation(now_s, queued, limit, slack_s), curve, pattern)
    assert until_s >= now_s
    if until_s > now_s:
        assert queued < limit
        assert until_s <= now_s + slack_s + 1e-9
        assert until_s <= 100.0 + 0.75 * saving(curve) + 1e-9


def test_it_waits_for_callers_that_return_together_until_they_are_there() -> None:
    curve = affine(0.02, 0.0005)
    pattern = learned(curve, 8, [0.001 * number for number in range(1, 8)])
    until_s = wait_until(Situation(100.0, 1, 32, 1.0), curve, pattern)
    assert 100.007 <= until_s <= 100.008
    assert wait_until(Situation(100.0, 1, 32, 0.0005), curve, pattern) == 100.0
    assert wait_until(Situation(100.008, 8, 32, 1.0), curve, pattern) == 100.008


def test_it_does_not_wait_where_nothing_arrives_or_nothing_is_saved() -> None:
    curve = affine(0.02, 0.0005)
    situation = Situation(100.0, 1, 32, 1.0)
    assert wait_until(situation, curve, ArrivalPattern()) == 100.0
    assert wait_until(situation, curve, learned(curve, 8, [])) == 100.0
    # One late arrival costs as much as it saves.
    assert wait_until(situation, curve, learned(curve, 8, [0.014])) == 100.0
    flat = affine(0.0, 0.01)
    assert wait_until(situation, flat, learned(flat, 8, [0.001] * 8)) == 100.0


def test_a_saving_too_small_to_be_divided_is_none() -> None:
    curve = affine(5e-324, 0.0)
    assert saving(curve) > 0
    assert wait_until(Situation(100.0, 1, 32, 1.0), curve, learned(curve, 8, [0.0])) == 100.0


def test_too_late_counts_the_batch_that_it_would_run_in() -> None:
    curve = affine(0.02, 0.0005)
    assert too_late(10.03, 10.0, 32, 32, curve)
    assert not too_late(10.03, 10.0, 2, 32, curve)
    assert not too_late(10.05, 10.0, 1000, 32, curve)
    assert curve.bound(32) == pytest.approx(0.0396)

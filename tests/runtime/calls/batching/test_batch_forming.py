"""Waiting for more items is bounded by what it can save and by deadlines, and happens only where it pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.calls.batching.batch_forming import STEP, STEPS, ArrivalPattern, saving, wait_until
from pilotflame.runtime.calls.batching.latency_curve import LatencyCurve, Point


def affine(fixed_s: float, each_s: float) -> LatencyCurve:
    return LatencyCurve(
        Point(n, fixed_s + n * each_s, 1.1 * (fixed_s + n * each_s)) for n in (1, 2, 4, 8, 16, 32)
    )


def learned(curve: LatencyCurve, size: int, offsets: list[float]) -> ArrivalPattern:
    """Return a pattern that has learned from two batches of `size`, each followed by arrivals at these offsets.

    A third batch ended at 100 s.
    """
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
    until_s = wait_until(now_s, queued, limit, slack_s, curve, pattern)
    assert until_s >= now_s
    if until_s > now_s:
        assert queued < limit
        assert until_s <= now_s + slack_s + 1e-9
        assert until_s <= 100.0 + 0.75 * saving(curve) + 1e-9


def test_it_waits_for_callers_that_return_together_until_they_are_there() -> None:
    curve = affine(0.02, 0.0005)
    pattern = learned(curve, 8, [0.001 * number for number in range(1, 8)])
    until_s = wait_until(100.0, 1, 32, 1.0, curve, pattern)
    assert 100.007 <= until_s <= 100.008
    assert wait_until(100.0, 1, 32, 0.0005, curve, pattern) == 100.0
    assert wait_until(100.008, 8, 32, 1.0, curve, pattern) == 100.008


def test_many_callers_that_return_late_are_still_waited_for() -> None:
    curve = affine(0.02, 0.0001)
    late = learned(curve, 8, [0.74 * saving(curve)] * 30)
    assert 0.74 <= (wait_until(100.0, 1, 64, 1.0, curve, late) - 100.0) / saving(curve) <= 0.7501
    later = learned(curve, 8, [0.76 * saving(curve)] * 30)
    assert wait_until(100.0, 1, 64, 1.0, curve, later) == 100.0


def test_it_does_not_wait_where_nothing_arrives_or_nothing_is_saved() -> None:
    curve = affine(0.02, 0.0005)
    situation = (100.0, 1, 32, 1.0)
    assert wait_until(*situation, curve, ArrivalPattern()) == 100.0
    assert wait_until(*situation, curve, learned(curve, 8, [])) == 100.0
    # With one late arrival, the cost of a wait equals its saving.
    assert wait_until(*situation, curve, learned(curve, 8, [0.014])) == 100.0
    flat = affine(0.0, 0.01)
    assert wait_until(*situation, flat, learned(flat, 8, [0.001] * 8)) == 100.0


def test_a_saving_too_small_to_be_divided_is_none() -> None:
    curve = affine(5e-324, 0.0)
    assert saving(curve) > 0
    assert wait_until(100.0, 1, 32, 1.0, curve, learned(curve, 8, [0.0])) == 100.0


# -- the arrival pattern


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

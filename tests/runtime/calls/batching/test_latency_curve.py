"""The latency curve stays between what was observed, never falls, and one outlier does not bend it."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pilotflame.runtime.calls.batching.latency_curve import KEPT, LatencyCurve, Point, isotonic

seconds = st.floats(1e-4, 10.0)
groups = st.lists(st.tuples(st.integers(1, 64), seconds), min_size=1, max_size=80)


@given(groups)
@example([(1, 1.0), (1, 1.0), (1, 2.0), (1, 2.0), (39, 2.0), (40, 2.0)])
def test_it_never_falls_and_lies_between_the_extremes_that_were_seen(seen: list[tuple[int, float]]) -> None:
    curve = LatencyCurve()
    for size, took_s in seen:
        curve.observe(size, float(size), took_s)
    low, high = min(took_s for _, took_s in seen), max(took_s for _, took_s in seen)
    largest = max(size for size, _ in seen)
    typical = [curve.typical(size) for size in range(1, largest + 1)]
    bound = [curve.bound(size) for size in range(1, largest + 1)]
    for values in (typical, bound):
        assert all(one <= two + 1e-9 for one, two in itertools.pairwise(values))
    assert all(low - 1e-9 <= value for value in typical)
    assert typical[0] <= bound[0] <= high
    assert all(one <= two + 1e-9 for one, two in zip(typical, bound, strict=True))
    assert [point.size for point in curve.points] == sorted({point.size for point in curve.points})


@given(st.lists(st.tuples(seconds, st.integers(1, 64).map(float)), min_size=1, max_size=20))
def test_isotonic_never_falls_invents_nothing_and_leaves_what_does_not_fall(
    weighted: list[tuple[float, float]],
) -> None:
    found, values = isotonic(weighted), [value for value, _ in weighted]
    assert found == sorted(found)
    assert set(found) <= set(values)
    ascending = sorted(weighted)
    assert isotonic(ascending) == [value for value, _ in ascending]


def test_it_finds_a_curve_that_is_there() -> None:
    draw, curve = random.Random(1), LatencyCurve()
    for _ in range(600):
        size = draw.choice([1, 2, 3, 5, 8, 13, 21, 32])
        curve.observe(size, float(size), (0.02 + 0.0005 * size) * draw.gauss(1, 0.05))
    for size in (1, 4, 16, 32):
        assert curve.typical(size) == pytest.approx(0.02 + 0.0005 * size, rel=0.06)
        assert 1.02 < curve.bound(size) / curve.typical(size) < 1.2


def test_one_hiccup_bends_neither_a_fresh_nor_a_measured_curve() -> None:
    measured = LatencyCurve([Point(1, 0.02, 0.021), Point(32, 0.036, 0.038)])
    measured.observe(32, 32.0, 10.0)
    assert measured.bound(32) == 0.038
    fresh = LatencyCurve()
    # The first call is often slow, and must not raise the bound.
    for took_s in (10.0, 0.02, 0.02):
        fresh.observe(1, 1.0, took_s)
    fresh.observe(8, 8.0, 0.03)
    assert fresh.bound(1) == 0.02


def test_a_machine_that_became_slower_is_believed() -> None:
    curve = LatencyCurve([Point(1, 0.02, 0.021), Point(32, 0.036, 0.038)])
    for _ in range(KEPT):
        curve.observe(32, 32.0, 0.2)
    assert curve.typical(32) == curve.bound(32) == 0.2


def test_sizes_are_costs_where_items_have_some() -> None:
    curve = LatencyCurve()
    for _ in range(200):
        curve.observe(2, 200.0, 0.2)
        curve.observe(4, 400.0, 0.4)
    assert curve.mean_cost == pytest.approx(100)
    assert curve.typical(3) == pytest.approx(0.3, rel=0.01)
    # Beyond the sizes that were observed, the curve continues in a straight line.
    assert curve.typical(8) == pytest.approx(0.8, rel=0.05)


def test_an_empty_curve_predicts_no_time() -> None:
    assert not LatencyCurve().points
    assert LatencyCurve().bound(32) == 0.0
    one = LatencyCurve([Point(4, 0.1, 0.2)])
    assert one.points
    assert (one.typical(1), one.bound(32)) == (0.1, 0.2)

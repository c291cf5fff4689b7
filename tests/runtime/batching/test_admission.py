"""The admission: when something that arrives now would end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.batching.admission import Load, drained_s, finish_s
from pilotflame.runtime.batching.latency_curve import LatencyCurve, Point

CURVE = LatencyCurve(Point(n, 0.02 + n * 0.001, 0.03 + n * 0.001) for n in (1, 2, 4, 8))
loads = st.builds(
    lambda ahead, more, lanes, limit, free_s: Load(10.0, ahead, ahead + more, lanes, limit, free_s),
    st.integers(0, 200), st.integers(0, 50), st.integers(1, 8), st.integers(1, 8), st.floats(9, 11),
)  # fmt: skip


def test_it_is_the_rest_of_what_runs_then_full_groups_then_its_own() -> None:
    load = Load(now_s=10.0, ahead=0, queued=0, lanes=1, limit=8, free_at_s=10.01)
    assert finish_s(load, CURVE) == pytest.approx(10.01 + 0.021)
    assert finish_s(replace(load, ahead=19), CURVE) == pytest.approx(10.01 + 2 * 0.028 + 0.024)
    assert finish_s(replace(load, ahead=19, lanes=2), CURVE) == pytest.approx(10.01 + 0.028 + 0.024)
    assert finish_s(replace(load, free_at_s=0.0), CURVE) == pytest.approx(10.0 + 0.021)
    assert finish_s(replace(load, free_at_s=math.inf), CURVE) == math.inf


@given(loads)
def test_more_ahead_is_never_sooner_and_more_lanes_never_later_by_more_than_a_group(load: Load) -> None:
    end_s = finish_s(load, CURVE)
    assert end_s >= max(load.now_s, load.free_at_s) + CURVE.typical(1)
    further = replace(load, ahead=load.ahead + load.limit * load.lanes)
    assert finish_s(further, CURVE) == pytest.approx(end_s + CURVE.typical(load.limit))
    assert finish_s(replace(load, lanes=load.lanes + 1), CURVE) <= end_s + CURVE.typical(load.limit)


@given(loads, st.integers(0, 100))
def test_it_is_drained_no_sooner_with_promises(load: Load, promised: int) -> None:
    assert load.now_s <= drained_s(load, CURVE) <= drained_s(load, CURVE, promised)
    assert drained_s(replace(load, queued=0), CURVE) == max(load.now_s, load.free_at_s)
    full = replace(load, queued=3 * load.limit * load.lanes)
    assert drained_s(full, CURVE) == pytest.approx(max(10.0, load.free_at_s) + 3 * CURVE.typical(load.limit))

"""Replays on the simulated ladder: waits, and the seconds and the cost of each rung."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.ladder import Ladder, Rung, Step
from pilotflame.runtime.node.scaling.ladder_simulator import Fixed, Replay, run, timeout

LADDER = Ladder((Rung(1e-4, 0), Rung(1e-5, 0.1), Rung(0, 5)), 0.001)
SERVICE_S = 0.2
GAPS = st.lists(st.floats(0.5, 1e5), min_size=1, max_size=60)


@given(GAPS)
def test_seconds_on_the_rungs_and_busy_seconds_are_the_whole_time(gaps: list[float]) -> None:
    arrivals = list(accumulate(gaps))
    found = run(Replay(arrivals, SERVICE_S, LADDER, Fixed(timeout(60, 2))))
    prices = [rung.hold_per_s for rung in LADDER.rungs]
    assert found.held == pytest.approx(sum(s * p for s, p in zip(found.rung_s, prices, strict=True)))
    assert found.waited_s == pytest.approx(sum(found.waits))
    assert len(found.waits) <= found.requests
    least_s = arrivals[-1] - arrivals[0] + SERVICE_S
    assert least_s <= sum(found.rung_s) + found.busy_s + 1e-6 <= least_s + 5 + 2e-6


def test_an_idle_period_longer_than_the_timeout_ends_with_a_wake_from_its_rung() -> None:
    arrivals = [0.0, 50.0, 200.0]
    found = run(Replay(arrivals, SERVICE_S, LADDER, Fixed(timeout(60, 1))))
    assert found.waits == [pytest.approx(0.1)]
    assert found.rung_s[1] == pytest.approx(200 - 50 - SERVICE_S - 60)
    assert run(Replay(arrivals, SERVICE_S, LADDER, Fixed(timeout(math.inf, 1)))).waits == []
    assert timeout(60, 1) == (Step(0.0, 0), Step(60, 1))

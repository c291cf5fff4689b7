"""Replays on the simulated ladder: waits, and the seconds and the cost of each rung."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.ladder import BurstWait, Ladder, Rung, Step
from pilotflame.runtime.node.scaling.ladder_simulator import (
    BurstWaits,
    Fixed,
    LadderRun,
    Replay,
    _after,
    run,
    run_together,
    timeout,
)

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


def test_arrivals_during_a_wake_wait_for_the_rest_of_it() -> None:
    arrivals = [0.0, 100.0, 103.0, 104.95, 106.0]
    found = run(Replay(arrivals, SERVICE_S, LADDER, Fixed(timeout(60, 2))))
    # The wake from the lowest rung takes 5 s. A wait of 0.05 s is not felt.
    assert found.waits == [pytest.approx(one) for one in (5.0, 2.0, 0.05)]
    assert (found.requests, found.woken, found.felt) == (5, 1, 2)
    assert found.waited_s == pytest.approx(7.05)
    # READY lasts from 0 to 60.2 s without the first call, for the 5 s of the wake, and from 105.2 s to the last call.
    assert found.rung_s == [pytest.approx(one) for one in (60 + 5 + 0.8, 0.0, 100 - 60.2)]
    assert found.busy_s == pytest.approx(3 * SERVICE_S)
    assert found.bill(2.0) == pytest.approx(found.held + 2 * found.waited_s)
    assert found.periods == [pytest.approx(99.8), pytest.approx(0.8)]


def test_a_worker_stays_for_a_quiet_time_before_the_plan_begins() -> None:
    plan = (Step(0.0, 0), Step(1.0, 1), Step(60.0, 2))
    assert _after(plan, 0.0) is plan
    assert _after(plan, 10.0) == (Step(0.0, 0), Step(10.0, 1), Step(60.0, 2))
    arrivals = [0.0, 5.0, 50.0]
    found = run(Replay(arrivals, SERVICE_S, LADDER, Fixed(timeout(1, 1)), quiet_s=10.0))
    assert (found.woken, len(found.periods)) == (1, 1)
    assert found.rung_s == [pytest.approx(one) for one in (4.8 + 10 + 0.1, 50 - 5.2 - 10, 0.0)]


def test_the_waits_for_a_wake_are_summed_whatever_the_rung_was() -> None:
    waits = BurstWaits(2.0)
    for arrival_s, ends_idle in ((0.0, True), (0.5, False), (1.5, True), (3.0, False), (3.0, True)):
        waits.arrive(arrival_s, ends_idle=ends_idle)
    # An arrival during a wake begins no other wake.
    assert waits.take() == BurstWait(2.0 + 1.5 + 0.5 + 0.0 + 2.0, 2)
    assert waits.take() == BurstWait()


def test_functions_that_are_replayed_together_cost_what_they_cost_alone() -> None:
    traces = ([0.0, 100.0, 300.0], [50.0, 51.0], [])
    alone = [run(Replay(one, SERVICE_S, LADDER, Fixed(timeout(60, 2)))) for one in traces]
    together = run_together([Replay(one, SERVICE_S, LADDER, Fixed(timeout(60, 2))) for one in traces])
    assert together == alone
    total = LadderRun()
    for one in alone:
        total += one
    assert (total.requests, total.woken, len(total.periods), len(total.waits)) == (5, 2, 3, 2)
    assert total.rung_s == [
        pytest.approx(sum(parts)) for parts in zip(*(one.rung_s for one in alone), strict=True)
    ]
    assert total.waited_s == pytest.approx(10.0)
    assert total.busy_s == pytest.approx(sum(one.busy_s for one in alone))

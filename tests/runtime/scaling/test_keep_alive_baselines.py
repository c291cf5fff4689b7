"""The policies that ours is compared with: what each does for habits that are plain, and that foresight is never beaten."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.scaling.keep_alive_baselines import (
    Foreseeing,
    Hybrid,
    timeout,
)
from pilotflame.runtime.scaling.ladder import Ladder, Rung, Step
from pilotflame.runtime.scaling.ladder_simulator import (
    Fixed,
    KeepAlivePolicy,
    LadderRun,
    Learned,
    Replay,
    run,
)

LADDER = Ladder((Rung(1e-4, 0), Rung(1e-5, 0.1), Rung(0, 5)), 0.001)
SERVICE_S = 0.2
GAPS = st.lists(st.floats(0.5, 1e5), min_size=1, max_size=60)


def replayed(gaps: list[float], policy: KeepAlivePolicy) -> LadderRun:
    return run(Replay(list(accumulate(gaps)), SERVICE_S, LADDER, policy))


@given(GAPS)
def test_foresight_is_never_beaten(gaps: list[float]) -> None:
    """One gap may delay the next period's beginning by its wake, so the bound has that much room."""
    best = replayed(gaps, Foreseeing(list(accumulate(gaps)), LADDER)).bill(LADDER.wait_per_s)
    slack = 1e-9 + LADDER.rungs[0].hold_per_s * 5.1 * len(gaps)
    for policy in (
        Fixed(timeout(60, 2)), Fixed(timeout(math.inf, 1)), Learned(LADDER), Fixed(LADDER.costs().envelope),
        Hybrid(60, 2, LADDER),
    ):  # fmt: skip
        assert best <= replayed(gaps, policy).bill(LADDER.wait_per_s) + slack


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


def test_foresight_climbs_just_in_time_and_its_bill_is_the_optimum() -> None:
    gaps = [3000.0] * 21
    found = replayed(gaps, Foreseeing(list(accumulate(gaps)), LADDER))
    assert found.waited_s == 0
    # Rung by rung: each is paid for the time of the climb from the rung below it.
    climbs = list(pairwise(LADDER.rungs))
    assert found.rung_s[0] == pytest.approx(20 * climbs[0][1].wake_s, rel=1e-3)
    bottom_per_s = LADDER.rungs[-1].hold_per_s
    climb = sum((upper.hold_per_s - bottom_per_s) * (lower.wake_s - upper.wake_s) for upper, lower in climbs)
    ideal = bottom_per_s * sum(found.periods) + 20 * climb
    assert found.bill(LADDER.wait_per_s) == pytest.approx(ideal, rel=1e-3)


def test_the_hybrid_histogram_learns_a_timer() -> None:
    policy = Hybrid(10, 2, LADDER)
    assert policy.plan(0.0) == timeout(2400, 2)
    for _ in range(10):
        policy.learn(600, 0.2, ())
    assert policy.plan(0.0) == (Step(0.0, 2), Step(600 * 0.9 - 5, 0), Step(610 * 1.1, 2))

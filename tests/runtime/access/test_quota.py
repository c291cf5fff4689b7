"""The quota never grants more than its limits, and a caller who waits as told is admitted."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.access.quota import Meter

RATES = st.floats(min_value=1e-3, max_value=1e4)
GAPS = st.lists(st.floats(min_value=0.0, max_value=1e4), max_size=60)


@given(RATES, st.integers(1, 100), GAPS, st.floats(min_value=0.0, max_value=1e9))
def test_never_more_than_burst_and_rate_grant(rate: float, burst: int, gaps: list[float], start_s: float):
    meter, now_s, taken = Meter(rate, burst, None, start_s), start_s, list[float]()
    for gap_s in gaps:
        now_s += gap_s
        if meter.enter(now_s) == 0.0:
            taken.append(now_s)
    for first, since_s in enumerate(taken):
        granted = burst + (now_s - since_s) * rate
        assert len(taken) - first <= granted * (1 + 1e-6) + 1e-6


@given(RATES, st.integers(1, 100), GAPS, st.floats(min_value=0.0, max_value=1e9))
def test_a_caller_who_waits_as_told_is_admitted(rate: float, burst: int, gaps: list[float], start_s: float):
    meter, now_s = Meter(rate, burst, None, start_s), start_s
    for gap_s in gaps:
        now_s += gap_s
        if wait_s := meter.enter(now_s):
            assert wait_s > 0
            # Retry-After has whole seconds.
            now_s += max(1, math.ceil(wait_s))
            assert meter.enter(now_s) == 0.0


@given(RATES, st.integers(1, 100), st.integers(1, 50))
def test_a_refused_request_costs_nothing(rate: float, burst: int, asked: int):
    patient, impatient = Meter(rate, burst, None, 0.0), Meter(rate, burst, None, 0.0)
    for meter in (patient, impatient):
        assert [meter.enter(0.0) for _ in range(burst)] == [0.0] * burst
    waits = {impatient.enter(0.0) for _ in range(asked)}
    assert waits == {patient.enter(0.0)}
    assert patient.enter(waits.pop()) == 0.0


def test_a_clock_that_goes_back_refills_nothing():
    meter = Meter(1.0, 1, None, 100.0)
    assert meter.enter(100.0) == 0.0
    assert meter.enter(50.0) == 1.0
    assert meter.enter(101.0) == 0.0


def test_concurrency_counts_those_that_run():
    meter = Meter(None, None, 2, 0.0)
    assert [meter.enter(0.0), meter.enter(0.0)] == [0.0, 0.0]
    assert meter.enter(0.0) > 0
    meter.leave()
    assert meter.enter(0.0) == 0.0
    assert meter.running == 2


def test_a_request_refused_for_one_quota_does_not_use_the_other():
    meter = Meter(1.0, 2, 1, 0.0)
    assert meter.enter(0.0) == 0.0
    # One is running, so no token is taken.
    assert meter.enter(0.0) > 0
    meter.leave()
    assert meter.enter(0.0) == 0.0
    meter.leave()
    assert meter.enter(0.0) == pytest.approx(1.0)
    assert meter.running == 0


def test_without_a_quota_all_requests_are_admitted():
    meter = Meter(None, None, None, 0.0)
    assert all(meter.enter(0.0) == 0.0 for _ in range(10_000))


@pytest.mark.parametrize(("rate", "burst"), [(0.1, 1), (1.0, 1), (2.5, 3), (20.0, 20)])
def test_without_a_burst_one_second_of_the_rate_is_admitted_at_once(rate: float, burst: int):
    meter = Meter(rate, None, None, 0.0)
    assert [meter.enter(0.0) for _ in range(burst)] == [0.0] * burst
    assert meter.enter(0.0) > 0

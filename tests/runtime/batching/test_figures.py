"""The figures of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pilotflame.runtime.batching.figures import figures, percentile
from pilotflame.runtime.batching.simulator import (
    DurationModel,
    Run,
    SimulatedAttempt,
    SimulatedCall,
    SimulatedFunction,
    Simulator,
    poisson,
)


def affine(fixed_s: float, each_s: float, noise: float = 0.05) -> DurationModel:
    """Return the model fixed + each x size."""
    return DurationModel(((1.0, fixed_s + each_s), (2.0, fixed_s + 2 * each_s)), noise)


def retry_once(attempt: SimulatedAttempt) -> SimulatedCall | None:
    if attempt.retry_after_s is None or attempt.tries > 1:
        return None
    return replace(attempt.call, at_s=attempt.ended_s + attempt.retry_after_s, tries=2)


def test_shares_are_of_the_calls_and_add_up() -> None:
    run = Simulator(SimulatedFunction(affine(0.01, 0.003)), next_call=retry_once).run(
        poisson(400, 400, timeout_s=0.25)
    )
    found = figures(run)
    assert found["calls"] == 400 < len(run.attempts)
    fates = [found[name] for name in ("on_time", "late", "refused", "dropped", "expired", "full")]
    assert sum(fates) == 400
    assert found["on_time_share"] == found["on_time"] / 400 < 1
    assert 0 < found["latency_p50_s"] <= found["latency_p99_s"] <= 0.25
    assert found["retry_after_p50_s"] > 0
    assert found["batch_mean"] == pytest.approx(sum(run.sizes) / len(run.sizes))
    assert 0.5 < found["busy_share"] <= 1


def test_one_call_alone() -> None:
    plant = SimulatedFunction(affine(0.01, 0.01, noise=0.0), transit_s=0.001)
    found = figures(Simulator(plant).run([SimulatedCall(5.0)]))
    assert found["latency_p99_s"] == pytest.approx(0.022)
    assert found["batch_mean"] == found["batch_p95"] == found["on_time_share"] == 1


def test_of_nothing_there_are_no_percentiles() -> None:
    assert percentile([], 0.5) is None
    assert figures(Run())["latency_p50_s"] is None

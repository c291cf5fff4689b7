"""The simulator, and with it the whole policy of admission, batching, fairness and retries."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.calls.batching.latency_curve import LatencyCurve
from pilotflame.runtime.calls.batching.queue import Forecast, Queue
from pilotflame.runtime.calls.batching.simulator import (
    CallOutcome,
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


def retrying(share: float) -> Callable[[SimulatedAttempt], SimulatedCall | None]:
    """Return a `next_call` with which this share of the refused callers retries once, after Retry-After."""
    draw = random.Random(1)

    def next_call(attempt: SimulatedAttempt) -> SimulatedCall | None:
        if attempt.retry_after_s is None or attempt.tries > 1 or draw.random() >= share:
            return None
        return replace(attempt.call, at_s=attempt.ended_s + attempt.retry_after_s, tries=2)

    return next_call


GPU, MID, CPU = affine(0.020, 0.0005), affine(0.010, 0.003), affine(0.004, 0.010)
CURVES = pytest.mark.parametrize("durations", [GPU, MID, CPU], ids=["gpu", "mid", "cpu"])


class GreedyForecast(Forecast):
    """A forecast that never learns that waiting could pay."""

    def wait_until(self, now_s: float, queued: int, earliest_deadline_s: float) -> float:
        return now_s


class Greedy(Queue[SimulatedAttempt]):
    """A queue that runs waiting calls at once."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **options)
        self.forecast = GreedyForecast(self.curve, self.forecast.max_batch)


def capacity(durations: DurationModel) -> float:
    return 32 / durations.mean_s(32)


def share(
    run: Run, outcome: CallOutcome = CallOutcome.ON_TIME, *, tenant: str | None = None, tries: int = 1
) -> float:
    fates = [
        one.outcome for one in run.attempts if one.tries == tries and (tenant is None or one.tenant == tenant)
    ]
    return fates.count(outcome) / len(fates)


def p99_s(run: Run) -> float:
    ascending = sorted(attempt.latency_s for attempt in run.attempts)
    return ascending[int(0.99 * len(ascending))]


def closed(callers: int, *, greedy: bool = False) -> float:
    """Return the responses per second on the GPU curve, if each caller calls again about 1 ms after its response."""
    draw = random.Random(1)

    def next_call(attempt: SimulatedAttempt) -> SimulatedCall:
        pause_s = max(draw.expovariate(1000), attempt.retry_after_s or 0.0)
        return SimulatedCall(attempt.ended_s + pause_s, body=attempt.body)

    simulator = Simulator(SimulatedFunction(GPU), queue_type=Greedy if greedy else Queue, next_call=next_call)
    first = [SimulatedCall(n / 1000 / callers, body=str(n).encode()) for n in range(callers)]
    run = simulator.run(first, until_s=3.0)
    return Counter(attempt.outcome for attempt in run.attempts)[CallOutcome.ON_TIME] / 3.0


@CURVES
@pytest.mark.parametrize("groups", [2, 4])
def test_at_a_fifth_too_much_load_hardly_less_is_on_time_than_could_be(
    durations: DurationModel, groups: int
) -> None:
    timeout_s = groups * durations.mean_s(32)
    run = Simulator(SimulatedFunction(durations)).run(
        poisson(1.2 * capacity(durations), 1600, timeout_s=timeout_s)
    )
    # At most 1 / 1.2 = 0.83 of the calls could be on time.
    assert share(run) >= 0.79
    # Hardly any call waits and still misses its deadline.
    assert share(run, CallOutcome.LATE) + share(run, CallOutcome.EXPIRED) < 0.02
    refused = [one for one in run.attempts if one.outcome in (CallOutcome.REFUSED, CallOutcome.DROPPED)]
    assert refused
    assert all(one.retry_after_s for one in refused)
    assert run.busy_s / run.span_s > 0.95


def test_callers_that_return_together_are_waited_for() -> None:
    assert closed(8) >= 265 > 1.3 * closed(8, greedy=True)
    assert closed(32) >= 690


@CURVES
def test_waiting_costs_nothing_where_callers_do_not_return(durations: DurationModel) -> None:
    calls = list(poisson(0.5 * capacity(durations), 1000))
    function = SimulatedFunction(durations)
    greedy = Simulator(function, queue_type=Greedy)
    assert p99_s(Simulator(function).run(calls)) <= 1.05 * p99_s(greedy.run(calls))


@pytest.mark.parametrize("share_of_callers", [0.3, 1.0])
def test_a_retry_when_told_succeeds(share_of_callers: float) -> None:
    simulator = Simulator(SimulatedFunction(MID), next_call=retrying(share_of_callers))
    run = simulator.run(poisson(1.2 * capacity(MID), 1500, timeout_s=0.5))
    assert share(run, tries=2) >= 0.95
    assert share(run, CallOutcome.EXPIRED) < 0.01


def test_a_slow_first_call_does_not_cause_refusals() -> None:
    curve = LatencyCurve()
    curve.observe(1, 1.0, 10.0)
    run = Simulator(SimulatedFunction(GPU), curve=curve).run(poisson(0.8 * capacity(GPU), 600, timeout_s=0.8))
    assert share(run) >= 0.97


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_a_tenant_that_sends_too_much_hurts_itself_alone(load: float) -> None:
    small = poisson(0.02 * capacity(GPU), 20, tenant="small", timeout_s=2.0, seed=2)
    large = poisson(load * capacity(GPU), int(20 * load / 0.02), tenant="large", timeout_s=2.0)
    run = Simulator(SimulatedFunction(GPU, max_queue=150)).run(
        heapq.merge(small, large, key=lambda call: call.at_s)
    )
    assert share(run, tenant="small") == 1.0
    assert share(run, tenant="large") < 0.9


def test_more_workers_do_more() -> None:
    shares = [
        share(
            Simulator(SimulatedFunction(MID, workers=workers)).run(
                poisson(3 * capacity(MID), 900, timeout_s=0.4)
            )
        )
        for workers in (1, 2, 4)
    ]
    assert shares[0] < 0.55 < shares[1] < 0.9 < shares[2] == 1.0


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = (
        Simulator(SimulatedFunction(CPU, seed=7)).run(poisson(100, 300, timeout_s=0.5, seed=3))
        for _ in range(2)
    )
    assert [one.latency_s for one in first.attempts] == [one.latency_s for one in second.attempts]


@settings(max_examples=25)
@given(
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 8), st.integers(1, 20),
    st.lists(st.tuples(st.floats(0, 0.5), st.sampled_from([0.03, 0.2, 5.0]), st.sampled_from("ab")), max_size=60),
)  # fmt: skip
def test_every_call_has_one_outcome(
    workers: int, slots: int, max_batch: int, max_queue: int, drawn: list[tuple[float, float, str]]
) -> None:
    calls = [SimulatedCall(at_s, timeout_s, tenant) for at_s, timeout_s, tenant in sorted(drawn)]
    function = SimulatedFunction(MID, max_batch=max_batch, workers=workers, slots=slots, max_queue=max_queue)
    run = Simulator(function).run(calls)
    assert [attempt.call for attempt in run.attempts] == calls
    for attempt in run.attempts:
        assert attempt.outcome is not None
        if attempt.outcome is CallOutcome.ON_TIME:
            assert attempt.ended_s <= attempt.deadline_s + 1e-9
        assert (attempt.retry_after_s is not None) == (
            attempt.outcome in (CallOutcome.REFUSED, CallOutcome.DROPPED, CallOutcome.FULL)
        )
    ran = sum(attempt.outcome in (CallOutcome.ON_TIME, CallOutcome.LATE) for attempt in run.attempts)
    assert sum(run.sizes) == ran
    assert max(run.sizes, default=0) <= max_batch
    assert run.busy_s <= run.span_s * workers * slots + 1e-9 or not calls


def test_durations_are_linear_between_points() -> None:
    durations = DurationModel(((1, 1.0), (3, 2.0), (5, 2.0)), noise=0.0)
    assert [durations.mean_s(size) for size in (0.5, 1, 2, 3, 4, 9)] == [1.0, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert durations.seconds(2, random.Random(1)) == 1.5

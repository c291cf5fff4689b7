"""The waits for starts, and the breaker that counts failed starts."""

from __future__ import annotations

import asyncio
import time

import pytest
from pilotflame.errors import ActivationFailed, QueueFull
from pilotflame.runtime.calls.serving.replicas import ReplicaList
from pilotflame.runtime.node.reconciling import start_outcomes
from pilotflame.runtime.node.reconciling.start_outcomes import Breaker, StartOutcomes


async def test_a_wait_beside_a_worker_that_was_ready_ends_when_no_worker_starts_or_is_ready_any_more() -> (
    None
):
    starts, replicas = StartOutcomes(), ReplicaList()
    replicas.note_asked(1.0)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waits = tasks.create_task(starts.reached(2, 60.0, settled=True))
        await asyncio.sleep(0)
        starts.note_workers(replicas)
        starts.refuse(ActivationFailed("It failed."))
        await asyncio.sleep(0)
        assert not waits.done()
        replicas.note_answered(1.0)
        starts.note_workers(replicas)


async def test_a_failed_start_ends_the_waits_for_a_first_worker() -> None:
    starts = StartOutcomes()
    error = ActivationFailed("It failed.")
    first, settled = (asyncio.ensure_future(starts.reached(1, 60.0, settled=one)) for one in (False, True))
    await asyncio.sleep(0)
    starts.note_failure(error)
    with pytest.raises(ActivationFailed, match="It failed"):
        await first
    assert not settled.done()
    settled.cancel()
    with pytest.raises(TimeoutError):
        await starts.reached(1, 0.0)
    assert starts._waiting == []
    assert starts.breaker.failures == 1
    starts.note_ready()
    assert (starts.breaker.failures, starts.breaker.backoff_until_s) == (0, 0.0)


async def test_a_limited_number_of_callers_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_outcomes, "MAX_WAITING", 1)
    starts = StartOutcomes()
    waits = asyncio.ensure_future(starts.reached(1, 60.0))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="1 callers wait"):
        await starts.reached(1, 60.0)
    waits.cancel()


def test_each_failure_doubles_the_time_to_the_next_start_up_to_a_limit() -> None:
    breaker, waits, opened = Breaker(), list[float](), list[bool]()
    for _ in range(12):
        breaker.fail(ActivationFailed("No licence."), 100.0)
        waits.append(breaker.backoff_until_s - 100.0)
        opened.append(breaker.open(100.0))
    assert waits == [min(300.0, 0.5 * 2**number) for number in range(12)]
    # The breaker opens with the fifth failure, for the time of its backoff.
    assert opened == [False] * 4 + [True] * 8
    assert not breaker.open(400.0)
    refused = breaker.refusal("f", 399.5)
    assert (
        refused.message
        == "The last 12 starts of a worker of f failed. The next is tried in 1 s. The last error: No licence."
    )
    assert (refused.details["cause"], refused.details["retry_after_s"]) == ("activation_failed", 0.5)
    assert "pilotflame reset f" in refused.remedy
    breaker.reset()
    assert not breaker.open(100.0)
    assert "The last error" not in breaker.refusal("f", 100.0).message


def test_waiting_calls_fail_after_three_deaths_in_a_row() -> None:
    starts = StartOutcomes()
    for _ in range(3):
        assert not starts.give_up()
        error = starts.note_death("f", "signal 11 (SIGSEGV)")
        assert error.message.endswith("of signal 11 (SIGSEGV).")
        assert error.remedy == "See `pilotflame logs f`."
    assert starts.give_up()
    # After `give_up` has returned True, the count begins again.
    assert not starts.give_up()
    starts.note_death("f", "signal 9 (SIGKILL)")
    starts.note_ready()
    for _ in range(2):
        starts.note_death("f", "signal 9 (SIGKILL)")
    assert not starts.give_up()
    for _ in range(3):
        starts.breaker.fail(ActivationFailed("no"), time.monotonic())
    assert starts.give_up()

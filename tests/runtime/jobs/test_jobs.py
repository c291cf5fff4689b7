"""What callers ask of jobs is done to its end, even if they hang up meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from live import Function, Gate, Gateway, until
from pilotflame.errors import JobStoreFailed, UnknownJob
from pilotflame.runtime.jobs.job import JobState
from pilotflame.runtime.jobs.jobs import Jobs

pytestmark = pytest.mark.asyncio(loop_scope="module")

SLEEPS = """
import asyncio, gate
async def handler(event):
    gate.say("at work")
    try:
        await asyncio.sleep(3600)
    finally:
        gate.say("stopped")
"""
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"


@pytest.fixture
def jobs(gateway: Gateway) -> Jobs:
    assert gateway.server is not None
    return gateway.server.jobs


async def run(function: Function, event: Any = None) -> str:
    response = await function.client.post(f"/v2/{function.name}/run", json={"input": event})
    return str(response.json()["id"])


class Held:
    """A call of the store that answers only when it may."""

    def __init__(self, real: Callable[..., Awaitable[Any]]) -> None:
        self._real = real
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def __call__(self, *args: Any, **more: Any) -> Any:
        self.asked.set()
        found = await self._real(*args, **more)
        await self.go.wait()
        return found


async def leave(asking: asyncio.Task[Any]) -> None:
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()


async def test_a_job_whose_canceller_hangs_up_is_stopped(
    deploy, gate: Gate, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy(SLEEPS, gate=gate)
    job = await run(function)
    await gate.next("at work")
    held = Held(jobs.store.cancel)
    monkeypatch.setattr(jobs.store, "cancel", held)
    asking = asyncio.create_task(jobs.cancel(function.name, job))
    await held.asked.wait()
    await leave(asking)
    held.go.set()
    await gate.next("stopped")


async def test_a_purge_whose_caller_hangs_up_is_finished(
    deploy, gate: Gate, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("pilotflame.runtime.jobs.transitions.PURGE_SLICE", 2)
    function = await deploy(WAITS, {"scale.max": 1}, gate=gate)
    first = await run(function, 0)
    await gate.next("0")
    waiting = [await run(function, number) for number in range(1, 7)]
    held = Held(jobs.store._database.read)
    with monkeypatch.context() as patched:
        patched.setattr(jobs.store._database, "read", held)
        asking = asyncio.create_task(jobs.purge(function.name))
        await held.asked.wait()
        await leave(asking)
    held.go.set()

    async def all_cancelled() -> bool:
        found = [await jobs.get(function.name, job) for job in waiting]
        return all(job.state is JobState.CANCELLED for job in found)

    await until(all_cancelled, "the end of the purge")
    gate.open()
    assert (await jobs.wait(function.name, first, 20.0)).state is JobState.COMPLETED


async def test_what_is_refused_reaches_the_caller_and_not_the_gateway(
    deploy, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    function = await deploy("def handler(event):\n    return event\n")
    with pytest.raises(UnknownJob):
        await jobs.cancel(function.name, "job-unknown")

    async def broken(*_: object) -> int:
        raise error

    monkeypatch.setattr(jobs.store, "purge", broken)
    for error in (JobStoreFailed("The disk is full."), TypeError("ours")):
        with pytest.raises(type(error)):
            await jobs.purge(function.name)
    job = await run(function, 3)
    assert (await jobs.wait(function.name, job, 20.0)).output == b"3"

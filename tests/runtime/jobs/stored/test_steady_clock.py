"""A system clock that is set: stored waits neither end early nor last longer while a gateway runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from job_store_tests import DONE, FAILED, KEEP_S, Clock, new_job
from pilotflame.errors import JobExpired, UnknownFunction
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored.job import JobState, Webhook
from pilotflame.runtime.jobs.stored.jobs import Expiry, Jobs
from pilotflame.runtime.jobs.stored.steady_clock import NOTICED_S, SteadyClock
from pilotflame.runtime.jobs.webhooks.delivery import DeliveryAttempt, RetrySchedule
from pilotflame.runtime.jobs.webhooks.signing import SigningKey

SETS = pytest.mark.parametrize("by_s", [-1e8, -3600.0, 3600.0, 1e8])


class Machine:
    """The clocks of a machine: the system's clock, and the time since the start."""

    def __init__(self) -> None:
        self.wall, self.since_boot = Clock(), Clock()
        self.wall.now_s = 1.7e9
        self.clock = SteadyClock(self.wall, self.since_boot)

    def pass_s(self, seconds: float) -> None:
        self.wall.now_s += seconds
        self.since_boot.now_s += seconds


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def clock(machine: Machine) -> SteadyClock:
    return machine.clock


@SETS
def test_a_clock_that_is_set_changes_nothing_until_it_is_followed(machine: Machine, by_s: float) -> None:
    clock, before_s = machine.clock, machine.clock()
    machine.wall.now_s += by_s
    machine.pass_s(5.0)
    assert (clock(), clock.behind_s) == (before_s + 5.0, by_s)
    clock.follow(by_s)
    assert (clock(), clock.behind_s) == (machine.wall(), 0.0)


def test_a_clock_that_is_slewed_is_not_followed(machine: Machine) -> None:
    machine.wall.now_s += NOTICED_S / 2
    assert machine.clock.behind_s == 0.0


@pytest_asyncio.fixture
async def expiry(store: SqliteJobStore, clock: SteadyClock) -> AsyncIterator[Expiry]:
    """Yield the expiry of the store. When it is woken, it follows a system clock that was set."""
    async with BackgroundTasks() as tasks:
        found = Expiry(store, KEEP_S, clock)
        found.start(tasks)
        yield found
        found.close()


async def followed(expiry: Expiry, machine: Machine) -> None:
    expiry._earlier.set()
    async with asyncio.timeout(20):
        while machine.clock.behind_s:
            await asyncio.sleep(0)


@SETS
async def test_a_delayed_job_starts_after_its_delay(
    store: SqliteJobStore, expiry: Expiry, machine: Machine, by_s: float
) -> None:
    job, _ = await store.submit(new_job())
    fence = await store.take(job.id)
    assert fence is not None
    assert await store.requeue(job.id, fence, FAILED, 100.0, counted=True)
    machine.pass_s(40.0)
    machine.wall.now_s += by_s
    assert await store.claim("tone", 1, machine.clock()) == []
    await followed(expiry, machine)
    assert await store.claim("tone", 1, machine.clock()) == []
    assert await store.next_due("tone") == pytest.approx(machine.clock() + 60.0)
    machine.pass_s(61.0)
    assert [one.id for one in await store.claim("tone", 1, machine.clock())] == [job.id]


@SETS
async def test_a_job_expires_after_its_ttl_and_a_result_after_its_retention(
    store: SqliteJobStore, expiry: Expiry, machine: Machine, by_s: float
) -> None:
    ended, _ = await store.submit(new_job())
    fence = await store.take(ended.id)
    assert fence is not None
    assert await store.finish(ended.id, fence, DONE)
    waits, _ = await store.submit(new_job(ttl_s=KEEP_S + 100.0))
    machine.pass_s(KEEP_S - 10.0)
    machine.wall.now_s += by_s
    await followed(expiry, machine)
    assert (await store.get("tone", ended.id)).state is JobState.COMPLETED
    assert (await store.get("tone", waits.id)).durations_ms(machine.clock())[0] == (KEEP_S - 10.0) * 1000
    assert await store.next_expiry(machine.clock()) == pytest.approx(machine.clock() + 10.0)
    machine.pass_s(111.0)
    while await store.next_expiry(machine.clock()) <= machine.clock():
        await store.expire()
    assert (await store.get("tone", waits.id)).state is JobState.TIMED_OUT
    with pytest.raises(JobExpired):
        await store.get("tone", ended.id)


@SETS
async def test_a_webhook_is_repeated_after_its_pause(
    store: SqliteJobStore, expiry: Expiry, machine: Machine, by_s: float
) -> None:
    await store.submit(new_job(webhook=Webhook("http://127.0.0.1/x", ("completed",))))
    (job,) = await store.claim("tone", 1, machine.clock())
    fence = await store.take(job.id)
    assert fence is not None
    assert await store.finish(job.id, fence, DONE)
    ((delivery,), _) = await store.due_deliveries(most=9, most_per_host=9, sending=())
    schedule = RetrySchedule(first_s=100.0, draw=lambda: 1.0)
    await store.record_attempt(delivery, DeliveryAttempt(machine.wall(), 500, "", 1), schedule)
    machine.wall.now_s += by_s
    for _ in range(2):
        found, next_s = await store.due_deliveries(most=9, most_per_host=9, sending=())
        assert (found, next_s) == ([], pytest.approx(machine.clock() + 100.0))
        await followed(expiry, machine)
    machine.pass_s(101.0)
    ((again,), _) = await store.due_deliveries(most=9, most_per_host=9, sending=())
    assert again.id == delivery.id


@SETS
async def test_jobs_that_come_while_the_stored_times_are_moved_have_the_new_time(
    store: SqliteJobStore, expiry: Expiry, machine: Machine, by_s: float
) -> None:
    database, begun, gate = store._database, threading.Event(), threading.Event()

    def block(_connection: Any) -> None:
        begun.set()
        gate.wait(20)

    async def queued(count: int) -> None:
        async with asyncio.timeout(20):
            while database._writes.qsize() < count:
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(database.write(block))
        await asyncio.to_thread(begun.wait, 20)
        submitted = [tasks.create_task(store.submit(new_job()))]
        await queued(1)
        machine.wall.now_s += by_s
        expiry._earlier.set()
        await queued(2)
        submitted.append(tasks.create_task(store.submit(new_job())))
        await queued(3)
        gate.set()
    await followed(expiry, machine)
    for one in submitted:
        assert (await store.get("tone", one.result()[0].id)).created_s == pytest.approx(machine.wall())


async def test_a_restart_moves_no_wait(tmp_path: Path, machine: Machine) -> None:
    def live(_name: str) -> Any:
        raise UnknownFunction("It is not deployed.")

    found: set[float | None] = set()
    for _ in range(3):
        clock = SteadyClock(machine.wall, machine.since_boot)
        store = SqliteJobStore(Database(tmp_path / "jobs.db", SCRIPTS), keep_s=KEEP_S, clock=clock)
        async with BackgroundTasks() as tasks:
            jobs = Jobs(store, clock, SigningKey(b"k" * 32), live, tasks, GatewaySettings())
            await jobs.start()
            if not await jobs.store.functions_waiting():
                job, _ = await jobs.store.submit(new_job())
                await jobs.store.take(job.id)
                await jobs.store.requeue(job.id, 1, FAILED, 100.0, counted=True)
            found.add(await jobs.store.next_due("tone"))
            await jobs.close()
        machine.wall.now_s -= 1e5
    assert found == {machine.wall() + 3e5 + 100.0}

"""The dispatcher's reads of the store: no job that becomes due between two reads is missed, and none runs twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live import LIMIT_S
from pilotflame.errors import RevisionRetired
from pilotflame.runtime.calls.serving.invocation import Invocation, Output
from pilotflame.runtime.ground.settings.scale_spec import ScaleSpec
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored import dispatcher as dispatcher_module
from pilotflame.runtime.jobs.stored.dispatcher import JobDispatcher
from pilotflame.runtime.jobs.stored.job import Job, JobOutcome, JobState, NewJob

JOB = NewJob("tone", b"1", execution_timeout_s=60.0, ttl_s=600.0)


class Echo:
    """A revision that completes each invocation at once and records its id."""

    streaming = False
    retiring = False
    policy = SimpleNamespace(scale=ScaleSpec(0, 1, 0, 1, 60.0))

    def __init__(self) -> None:
        self.ran: list[str] = []

    def submit(self, invocation: Invocation) -> None:
        self.ran.append(invocation.id)
        invocation.worker = "tone-1"
        assert invocation.on_sent is not None
        invocation.on_sent()
        invocation.end(Output(invocation.body, "application/json"))

    def cancel(self, invocation: Invocation) -> None:
        invocation.end(None)


class SlowStore(SqliteJobStore):
    """Awaits `meanwhile` after a read of the due jobs, before it returns them. Records the ids of the jobs that it returns, and of the
    jobs that the dispatcher unclaims.
    """

    meanwhile: Any = None

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.read: list[str] = []
        self.unclaimed: list[str] = []

    async def unclaim(self, job_ids: Collection[str]) -> None:
        self.unclaimed += job_ids

    async def claim(self, *asked: Any) -> list[Job]:
        found = await super().claim(*asked)
        self.read += [job.id for job in found]
        if self.meanwhile is not None:
            await self.meanwhile(found)
        return found


@pytest.fixture
async def database(tmp_path: Path) -> Any:
    database = Database(tmp_path / "jobs", SCRIPTS)
    await asyncio.to_thread(database.open)
    yield database
    await asyncio.to_thread(database.close)


async def final(store: SqliteJobStore, job: Job) -> Job:
    async with asyncio.timeout(LIMIT_S):
        while not (found := await store.get(job.function, job.id)).state.final:
            await asyncio.sleep(0.001)
    return found


def dispatcher_of(
    store: SqliteJobStore, revision: Echo, tasks: BackgroundTasks, full: Collection[str] = ()
) -> JobDispatcher:
    """Return a dispatcher of the jobs of one revision. The owners in `full` may store no more results."""
    live: Any = SimpleNamespace(revision=revision, logs=LogChannel())
    return JobDispatcher(store, lambda _name: live, tasks, full.__contains__)


async def test_a_job_that_becomes_due_during_a_read_is_run(database: Database):
    store, echo = SlowStore(database, keep_s=600.0), Echo()
    job, _ = await store.submit(JOB)
    assert await store.take(job.id)
    due_s = time.time() + 0.05
    await store.requeue(job.id, 1, JobOutcome(JobState.FAILED), 0.05, counted=True)

    async def until_due(_found: list[Job]) -> None:
        await asyncio.sleep(max(0.0, due_s + 0.01 - time.time()))

    store.meanwhile = until_due
    async with BackgroundTasks() as tasks:
        dispatcher = dispatcher_of(store, echo, tasks)
        dispatcher.wake("tone")
        assert (await final(store, job)).state is JobState.COMPLETED
        dispatcher.stop()


async def test_a_job_that_ends_during_a_read_does_not_run_again(database: Database):
    store, echo = SlowStore(database, keep_s=600.0), Echo()
    first, _ = await store.submit(JOB)
    reads = 0

    async def second_read_is_slow(found: list[Job]) -> None:
        nonlocal reads
        reads += 1
        if reads == 1:
            # Make the dispatcher read again at once, while the first job runs.
            dispatcher.wake("tone")
        elif [job.id for job in found] == [first.id]:
            await final(store, first)
            # Let the dispatcher notice the end of the first job before the read returns.
            await asyncio.sleep(0.01)

    store.meanwhile = second_read_is_slow
    async with BackgroundTasks() as tasks:
        dispatcher = dispatcher_of(store, echo, tasks)
        dispatcher.wake("tone")
        await final(store, first)
        second, _ = await store.submit(JOB)
        dispatcher.wake("tone")
        await final(store, second)
        dispatcher.stop()
    assert echo.ran == [first.id, second.id]


async def test_a_submitted_job_is_not_read_again(database: Database):
    """If submitted jobs were read again, each end of a job would read the inputs of all jobs that wait for a worker."""
    waiting = Waiting()
    store = SlowStore(database, keep_s=600.0)
    jobs = [(await store.submit(JOB))[0].id for _ in range(6)]
    async with BackgroundTasks() as tasks:
        dispatcher = dispatcher_of(store, waiting, tasks)
        dispatcher.wake("tone")
        async with asyncio.timeout(LIMIT_S):
            while len(waiting.submitted) < 6:
                await asyncio.sleep(0.001)
            for job in jobs:
                dispatcher.wake("tone")
                waiting.complete()
                while not (await store.get("tone", job)).state.final:
                    await asyncio.sleep(0.001)
        dispatcher.stop()
    assert store.read == jobs


class Waiting(Echo):
    """A revision that completes an invocation when the test calls `complete`."""

    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[Invocation] = []

    def submit(self, invocation: Invocation) -> None:
        self.submitted.append(invocation)

    def complete(self) -> None:
        super().submit(self.submitted[len(self.ran)])


async def test_accepted_jobs_of_an_owner_without_room_for_results_wait(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(dispatcher_module, "FULL_RETRY_S", 0.05)
    store, echo, full = SlowStore(database, keep_s=600.0), Echo(), {"greedy"}
    greedy = [(await store.submit(replace(JOB, owner="greedy")))[0] for _ in range(3)]
    other, _ = await store.submit(replace(JOB, owner="other"))
    async with BackgroundTasks() as tasks:
        dispatcher = dispatcher_of(store, echo, tasks, full)
        dispatcher.wake("tone")
        await final(store, other)
        assert echo.ran == [other.id]
        assert {*store.unclaimed} == {job.id for job in greedy}
        full.clear()
        for job in greedy:
            assert (await final(store, job)).state is JobState.COMPLETED
        dispatcher.stop()


class Retires(Echo):
    """A revision that refuses the first job, and returns the second one before a worker has it."""

    refused = 0

    def submit(self, invocation: Invocation) -> None:
        self.refused += 1
        if self.refused == 1:
            raise RevisionRetired("It is replaced.")
        if self.refused > 2:
            super().submit(invocation)
        else:
            invocation.output.set_exception(RevisionRetired("It is replaced."))


async def test_a_job_that_no_worker_had_is_unclaimed(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatcher_module, "FULL_RETRY_S", 0.01)
    store = SlowStore(database, keep_s=600.0)
    job, _ = await store.submit(JOB)
    async with BackgroundTasks() as tasks:
        dispatcher = dispatcher_of(store, Retires(), tasks)
        dispatcher.wake("tone")
        for count in (1, 2):
            async with asyncio.timeout(LIMIT_S):
                while store.unclaimed != [job.id] * count:
                    await asyncio.sleep(0.001)
        while not (await store.get("tone", job.id)).state.final:
            dispatcher.wake("tone")
            await asyncio.sleep(0.01)
        dispatcher.stop()
    assert (await store.get("tone", job.id)).attempts == 1

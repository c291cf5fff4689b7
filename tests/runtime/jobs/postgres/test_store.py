"""The store of jobs on PostgreSQL: the contract, several gateways, and faults."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, TypeVar

import hypothesis
import psycopg
import pytest
import pytest_asyncio
from hypothesis.stateful import run_state_machine_as_test
from job_store_machine import StoreMachine
from job_store_tests import DONE, KEEP_S, Clock, JobStoreTests, MakeStore, new_job
from pilotflame.errors import JobStoreFailed, QueueFull
from pilotflame.runtime.jobs.postgres import database
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase, PostgresJobsConnection
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.stored import large_bodies
from pilotflame.runtime.jobs.stored.job import JobCounts, JobOutcome, JobState, new_job_id
from postgres import PostgresServer, join, new_schema, postgres_server

T = TypeVar("T")
Two = tuple[PostgresJobStore, PostgresJobStore]


class TestJobStore(JobStoreTests):
    """Runs the tests of all stores on PostgreSQL. conftest.py has the fixtures."""


class TestJobStoreWithFiles(JobStoreTests):
    """Runs the same tests, but stores all bodies of more than one byte as large bodies."""

    @pytest.fixture(autouse=True)
    def files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(large_bodies, "MOST_INLINE_BYTES", 1)


class PostgresMachine(StoreMachine):
    """Compares the store on PostgreSQL with the model. Each run has its own schema."""

    server: ClassVar[PostgresServer]

    def __init__(self) -> None:
        self.url = new_schema(self.server.url, f"m{secrets.token_hex(8)}")
        super().__init__()

    def open(self) -> None:
        super().open()
        join(self.url, self.made.incarnation)

    def make_store(self) -> PostgresJobStore:
        self.made = PostgresJobStore(
            PostgresDatabase(self.url), keep_s=KEEP_S, clock=lambda: self.model.now_s
        )
        return self.made


def test_any_sequence_of_calls_follows_the_model(postgres: PostgresServer) -> None:
    PostgresMachine.server = postgres
    limits = hypothesis.settings(max_examples=6, stateful_step_count=40, deadline=None)
    run_state_machine_as_test(PostgresMachine, settings=limits)


# -- several live gateways


@pytest_asyncio.fixture
async def two(make_store: MakeStore, postgres_url: str) -> Two:
    """Return the stores of two gateways, which both have a lease."""
    one, other = await make_store(), await make_store()
    join(postgres_url, one.incarnation, alone=False)
    return one, other


async def test_gateways_claim_different_jobs(two: Two, clock: Clock) -> None:
    one, other = two
    for number in range(10):
        await one.submit(new_job(body=b"%d" % number, owner=f"o{number % 3}"))
    claims = [await store.claim("tone", 3, clock.now_s) for store in (one, other, one, other, one)]
    # Each further claim of a gateway returns its claimed jobs again, unless the gateway names them as known.
    assert claims[0] == claims[2] == claims[4]
    assert claims[1] == claims[3]
    claimed = [job.id for job in claims[0] + claims[1]]
    assert len(set(claimed)) == 6
    rest = await other.claim("tone", 10, clock.now_s, known=claimed)
    assert len(rest) == 4
    assert await one.claim("tone", 10, clock.now_s, known=claimed) == []


async def test_only_the_gateway_that_has_claimed_a_job_starts_it(two: Two, clock: Clock) -> None:
    one, other = two
    job, _ = await other.submit(new_job())
    assert [found.id for found in await one.claim("tone", 1, clock.now_s)] == [job.id]
    assert await other.take(job.id, "w") is None
    woken: list[set[str]] = []
    one.on_commit = lambda changes: woken.append(changes.queued)
    await one.unclaim([job.id])
    assert woken == [{"tone"}]
    assert await other.take(job.id, "w") == 1
    assert await one.take(job.id, "w") is None
    await one.unclaim([job.id])
    assert await other.finish(job.id, 1, DONE)


async def test_the_jobs_of_a_dead_gateway_are_free_and_those_of_a_live_one_are_not(
    two: Two, make_store: MakeStore, clock: Clock, postgres_url: str
) -> None:
    one, other = two
    jobs = [(await one.submit(new_job(max_attempts=attempts)))[0] for attempts in (1, 2, 2)]
    assert [await one.take(job.id, "w") for job in jobs[:2]] == [1, 1]
    assert len(await one.claim("tone", 10, clock.now_s)) == 1
    assert await other.requeue_dead() == (0, 0)
    assert await other.claim("tone", 10, clock.now_s) == []
    third = await make_store()
    join(postgres_url, other.incarnation, alone=False)
    assert await other.requeue_dead() == (1, 1)
    assert await third.requeue_dead() == (0, 0)
    assert {job.id for job in await third.claim("tone", 10, clock.now_s)} == {jobs[1].id, jobs[2].id}
    # The gateway without a lease was only slow. It may still end the second job, which has not begun again. The first job has failed.
    assert not await one.finish(jobs[0].id, 1, DONE)
    assert await one.finish(jobs[1].id, 1, DONE)
    assert await third.take(jobs[1].id, "w") is None
    assert (await third.get("tone", jobs[0].id)).state is JobState.FAILED


async def test_an_idempotency_key_is_one_job_over_all_gateways(two: Two) -> None:
    results = await asyncio.gather(*(store.submit(new_job(idempotency="k")) for store in two * 50))
    assert len({job.id for job, _ in results}) == 1
    assert (await two[0].counts("tone")).in_queue == 1


async def test_limits_hold_over_all_gateways(two: Two) -> None:
    asked = [store.submit(new_job(max_queued=7)) for store in two * 20]
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results].count(QueueFull) == 33
    assert (await two[1].counts("tone")).in_queue == 7


async def test_newer_jobs_are_in_the_order_of_the_commits(two: Two) -> None:
    """A caller that repeatedly reads the jobs after the last job that it knows misses no job."""
    first, _ = await two[0].submit(new_job())
    seen = [first.id]

    async def read() -> None:
        while len(seen) < 201:
            seen.extend(await two[1].newer_ids(["tone"], 100, seen[-1]))

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        for number in range(200):
            tasks.create_task(two[number % 2].submit(new_job()))
    assert len(set(seen)) == 201


# -- faults


async def test_a_server_that_is_killed_loses_nothing_and_does_nothing_twice(clock: Clock) -> None:
    """Callers repeat failed calls with the same job id. All results that a caller has received stay valid."""
    with postgres_server() as server:
        server.stop()
        server.start("fsync=on", "synchronous_commit=on")
        store = PostgresJobStore(PostgresDatabase(server.url), keep_s=KEEP_S, clock=clock)
        await store.open()
        join(server.url, store.incarnation)
        done: list[str] = []

        async def run(number: int) -> None:
            job_id = new_job_id(clock.now_s)
            await again(lambda: store.submit(new_job(body=b"%d" % number), job_id))
            fence = await again(lambda: store.take(job_id, "w"))
            assert fence == 1
            assert await again(
                lambda: store.finish(job_id, 1, JobOutcome(JobState.COMPLETED, b"%d" % number))
            )
            done.append(job_id)

        async def callers() -> None:
            for start in range(0, 160, 16):
                await asyncio.gather(*(run(number) for number in range(start, start + 16)))

        async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(callers())
            while not running.done():
                await asyncio.sleep(0.3)
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start, "fsync=on", "synchronous_commit=on")
        assert await store.counts("tone") == JobCounts(completed=160)
        assert len(set(done)) == 160
        for job_id in done:
            job = await store.get("tone", job_id)
            assert (job.attempts, job.output) == (1, job.input)
        await store.close()


@pytest.mark.parametrize("inline", [1, 1 << 20])
async def test_a_lost_answer_to_a_commit_keeps_what_was_stored(
    store: PostgresJobStore, monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    """The change runs again, finds the rows and bodies of its first run, and deletes none of them."""
    monkeypatch.setattr(large_bodies, "MOST_INLINE_BYTES", inline)
    real, lost = PostgresJobsConnection.execute, list[str]()

    def lose(self: PostgresJobsConnection, sql: str, values: Sequence[Any] = ()) -> Any:
        found = real(self, sql, values)
        if sql == "COMMIT" and lost:
            lost.pop()
            self.close()
            raise psycopg.OperationalError("the answer was lost")
        return found

    monkeypatch.setattr(PostgresJobsConnection, "execute", lose)
    for new in (new_job(body=b"in put"), new_job(body=b"in put", idempotency="k")):
        lost.append("submit")
        job, _ = await store.submit(new)
        assert await store.take(job.id, "w") == 1
        lost.append("finish")
        assert await store.finish(job.id, 1, JobOutcome(JobState.COMPLETED, b"out put"))
        found = await store.get("tone", job.id)
        assert (found.input, found.output, found.attempts) == (b"in put", b"out put", 1)
    lost.append("record")
    ended = new_job(body=b"in put").queued("an-id", 1.0)
    await store.record(new_job(body=b"in put"), ended, JobOutcome(JobState.COMPLETED, b"out put"))
    found = await store.get("tone", "an-id")
    assert (found.input, found.output) == (b"in put", b"out put")
    assert await store.counts("tone") == JobCounts(completed=3)
    assert not lost


async def again(call: Callable[[], Awaitable[T]]) -> T:
    while True:
        try:
            return await call()
        except JobStoreFailed:
            await asyncio.sleep(0.05)


async def test_a_gateway_that_stands_still_with_the_lock_stops_no_other(
    two: Two, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_BEGIN_WRITE", database._BEGIN_WRITE.replace("'5s'", "'200ms'"))
    held, free = threading.Event(), threading.Event()

    def stand_still(_connection: object) -> None:
        held.set()
        free.wait(30)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(two[0]._database.write(stand_still))
        await asyncio.to_thread(held.wait, 30)
        async with asyncio.timeout(20):
            job, _ = await two[1].submit(new_job())
        free.set()
    assert (await two[0].get("tone", job.id)).id == job.id

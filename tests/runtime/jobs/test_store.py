"""The store of jobs against a simple model of it, through restarts, kills and full disks."""

import asyncio
import dataclasses
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from jobs_model import KEEP_S, QUEUED, Clock, Model, ModelJob
from pilotflame.errors import (
    IdempotencyConflict,
    JobConflict,
    JobExpired,
    JobStoreFailed,
    PilotflameError,
    QueueFull,
    UnknownJob,
)
from pilotflame.runtime.jobs import outbox, schema, transitions
from pilotflame.runtime.jobs.database import Database
from pilotflame.runtime.jobs.job import ALL, Job, JobCounts, JobOutcome, JobState, NewJob, Webhook
from pilotflame.runtime.jobs.schema import SCRIPTS
from pilotflame.runtime.jobs.store import JobStore
from pilotflame.runtime.jobs.transaction import Transaction

FUNCTIONS = ("tone", "echo")
OWNERS = ("", "key-1", "key-2")
HOOK = Webhook("http://127.0.0.1/hook", ("start", "output", "completed"))
DONE = JobOutcome(JobState.COMPLETED, output=b'"done"')
FAILED = JobOutcome(JobState.FAILED)


def new(function: str = "tone", body: bytes = b"{}", **more: Any) -> NewJob:
    return NewJob(function, body, execution_timeout_s=60.0, **{"ttl_s": 1000.0, **more})


def deliveries(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    rows = connection.execute("SELECT job_id, event FROM deliveries ORDER BY rowid")
    return [(job_id, event) for job_id, event in rows]


class StoreMachine(RuleBasedStateMachine):
    """Runs any sequence of calls; after each, all that can be read equals the model."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="pf-jobs-"))
        self.runner = asyncio.Runner()
        self.model = Model()
        self.queued: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.open()

    def open(self) -> None:
        self.database = Database(self.folder / "jobs.db", SCRIPTS)
        self.database.open()
        self.store = JobStore(
            self.database, keep_s=KEEP_S, on_commit=self.on_commit, clock=lambda: self.model.now_s
        )

    def on_commit(self, transaction: Transaction) -> None:
        self.queued += sorted(transaction.queued)
        self.cancelled += transaction.cancelled

    def teardown(self) -> None:
        self.database.close()
        self.runner.close()
        shutil.rmtree(self.folder)

    def run(self, asked: Coroutine[None, None, Any]) -> Any:
        return self.runner.run(asked)

    def refused(self, error: type[PilotflameError], asked: Coroutine[None, None, Any]) -> None:
        with pytest.raises(error):
            self.run(asked)

    @initialize(target=ids)
    def unknown(self) -> str:
        return "job-unknown"

    @rule(
        target=ids,
        function=st.sampled_from(FUNCTIONS),
        body=st.sampled_from([b"a", b"bb"]),
        key=st.sampled_from(["", "", "k1", "k2"]),
        wanted=st.sampled_from(["", "", "mine"]),
        owner=st.sampled_from(OWNERS),
        priority=st.integers(0, 2),
        max_attempts=st.integers(1, 3),
        ttl_s=st.sampled_from([30.0, 5000.0]),
        webhook=st.sampled_from([None, HOOK]),
    )
    def submit(self, function: str, body: bytes, key: str, wanted: str, **more: Any) -> str:
        asked = new(function, body, idempotency=key, wanted_id=wanted, **more)
        expected = self.model.replayed(asked)
        self.queued.clear()
        if isinstance(expected, PilotflameError):
            self.refused(type(expected), self.store.submit(asked))
            assert not self.queued
            return wanted or "job-unknown"
        job, replayed = self.run(self.store.submit(asked))
        assert (job.id if replayed else None) == expected
        if not replayed:
            assert job.id == wanted or (not wanted and job.id not in self.model.jobs)
            self.model.submit(job.id, asked)
            assert job == self.run(self.store.get(function, job.id))
        assert self.queued == [function] * (not replayed)
        return str(job.id)

    @rule(job_id=ids)
    def take(self, job_id: str) -> None:
        fence = self.run(self.store.take(job_id, "w"))
        assert (fence is not None) == self.model.take(job_id)
        if fence is not None:
            kept = self.model.jobs[job_id]
            job = self.run(self.store.get(kept.new.function, job_id))
            assert (job.worker, job.started_s, job.attempts) == ("w", self.model.now_s, fence)

    @rule(
        target=ids,
        function=st.sampled_from(FUNCTIONS),
        owner=st.sampled_from(OWNERS),
        ttl_s=st.sampled_from([30.0, 50.0]),
    )
    def start(self, function: str, owner: str, ttl_s: float) -> str:
        """A job that is stored when a worker has it."""
        job_id = f"started-{len(self.model.jobs)}-{self.model.arrived}"
        asked = new(function, owner=owner, ttl_s=ttl_s, wanted_id=job_id)
        assert self.run(self.store.start(asked, "w")) == 1
        self.model.submit(job_id, asked)
        assert self.model.take(job_id)
        return job_id

    @rule(
        target=ids,
        function=st.sampled_from(FUNCTIONS),
        owner=st.sampled_from(OWNERS),
        state=st.sampled_from(["COMPLETED", "FAILED"]),
    )
    def record(self, function: str, owner: str, state: str) -> str:
        """A job that is stored when it has ended: the rows are the same as after submit, take and finish."""
        asked, outcome = new(function, owner=owner), JobOutcome(JobState(state), output=b"o", logs="l")
        queued = asked.queued(f"ended-{self.model.arrived}", self.model.now_s)
        started = dataclasses.replace(queued, worker="w", started_s=self.model.now_s)
        job = self.run(self.store.record(asked, started, outcome))
        self.model.submit(job.id, asked)
        self.model.take(job.id)
        self.model.end(job.id, outcome)
        assert job == self.run(self.store.get(function, job.id))
        return str(job.id)

    def fence(self, job_id: str, off: int) -> int:
        return self.model.jobs[job_id].attempts - off if job_id in self.model.jobs else 1

    @rule(
        job_id=ids,
        off=st.sampled_from([0, 0, 0, 1, -1]),
        state=st.sampled_from([s for s in JobState if s.final]),
    )
    def finish(self, job_id: str, off: int, state: JobState) -> None:
        fence = self.fence(job_id, off)
        outcome = JobOutcome(state, output=b"o" if state is JobState.COMPLETED else None, logs="l")
        finished = self.run(self.store.finish(job_id, fence, outcome))
        assert finished == self.model.held(job_id, fence)
        if finished:
            self.model.end(job_id, outcome)

    @rule(
        job_id=ids,
        off=st.sampled_from([0, 0, 0, 1]),
        delay_s=st.sampled_from([0.0, 50.0]),
        counted=st.booleans(),
    )
    def requeue(self, job_id: str, off: int, delay_s: float, counted: bool) -> None:
        fence, error = self.fence(job_id, off), {"type": "worker_died"}
        failure = JobOutcome(JobState.FAILED, error=error, logs="l")
        requeued = self.run(self.store.requeue(job_id, fence, failure, delay_s=delay_s, counted=counted))
        assert requeued == self.model.held(job_id, fence)
        if requeued:
            self.model.requeue(job_id, delay_s, counted=counted, logs="l")
            function = self.model.jobs[job_id].new.function
            assert self.run(self.store.get(function, job_id)).error == error

    @rule(job_id=ids, off=st.sampled_from([0, 0, 1]), again=st.integers(0, 2), count=st.integers(0, 3))
    def add_pieces(self, job_id: str, off: int, again: int, count: int) -> None:
        fence = self.fence(job_id, off)
        job = self.model.jobs.get(job_id)
        first = max(1, len(job.pieces) + 1 - again) if job else 1
        more = [b"%d" % number for number in range(first, first + count)]
        stored = self.run(self.store.add_pieces(job_id, fence, first, more))
        assert stored == self.model.held(job_id, fence)
        if stored and job:
            fresh = more[len(job.pieces) + 1 - first :]
            job.pieces += fresh
            if fresh:
                self.model.notify(job_id, "output")
            self.refused(JobConflict, self.store.add_pieces(job_id, fence, len(job.pieces) + 2, [b"gap"]))

    @rule(job_id=ids, off=st.sampled_from([0, 0, 1]))
    def set_progress(self, job_id: str, off: int) -> None:
        fence = self.fence(job_id, off)
        stored = self.run(self.store.set_progress(job_id, fence, b"50"))
        assert stored == self.model.held(job_id, fence)
        if stored:
            self.model.jobs[job_id].progress = b"50"
            self.model.notify(job_id, "output")

    @rule(job_id=ids, function=st.sampled_from(FUNCTIONS), owner=st.sampled_from((ALL, *OWNERS)))
    def cancel(self, job_id: str, function: str, owner: str) -> None:
        if error := self.model.absent(function, job_id, owner):
            self.refused(error, self.store.cancel(function, job_id, owner))
            return
        was = self.model.jobs[job_id].state
        self.cancelled.clear()
        job = self.run(self.store.cancel(function, job_id, owner))
        assert self.cancelled == ([] if was.final else [(function, job_id)])
        if not was.final:
            self.model.end(job_id, JobOutcome(JobState.CANCELLED))
        assert job.state is self.model.jobs[job_id].state

    @rule(job_id=ids, function=st.sampled_from(FUNCTIONS), owner=st.sampled_from((ALL, *OWNERS)))
    def retry(self, job_id: str, function: str, owner: str) -> None:
        if error := self.model.absent(function, job_id, owner):
            self.refused(error, self.store.retry(function, job_id, owner))
        elif self.model.retry(job_id):
            self.queued.clear()
            job = self.run(self.store.retry(function, job_id, owner))
            assert (job.id, job.state, self.queued) == (job_id, QUEUED, [function])
        else:
            self.refused(JobConflict, self.store.retry(function, job_id, owner))

    @rule(
        function=st.sampled_from(FUNCTIONS), delete=st.booleans(), owner=st.sampled_from((ALL, *OWNERS[1:]))
    )
    def purge(self, function: str, delete: bool, owner: str) -> None:
        jobs = self.model.owned(function, owner)
        purged = [JobState.IN_PROGRESS, QUEUED] if delete else [QUEUED]
        ended = [job_id for state in purged for job_id, job in jobs.items() if job.state is state]
        self.cancelled.clear()
        assert self.run(self.store.purge(function, owner, running=delete)) == len(ended)
        assert sorted(self.cancelled) == sorted((function, job_id) for job_id in ended)
        for job_id in ended:
            self.model.end(job_id, JobOutcome(JobState.CANCELLED))

    @rule(passes_s=st.sampled_from([10.0, 60.0, 150.0]), limit=st.sampled_from([1, 2, 100]))
    def expire(self, passes_s: float, limit: int) -> None:
        self.model.now_s += passes_s
        self.model.expire()
        while self.run(self.store.next_expiry(self.model.now_s)) <= self.model.now_s:
            assert self.run(self.store.expire(limit))

    @rule()
    def restart(self) -> None:
        self.database.close()
        self.open()
        running = [job_id for job_id, job in self.model.jobs.items() if job.state is JobState.IN_PROGRESS]
        assert self.run(self.store.recover()) == len(running)
        for job_id in running:
            self.model.requeue(job_id, 0.0, counted=True)

    @invariant()
    def everything_equals_the_model(self) -> None:
        self.run(self.check())

    async def check(self) -> None:
        for job_id, kept in self.model.jobs.items():
            await self.check_job(job_id, kept)
        for job_id, (function, *_) in self.model.deleted.items():
            if job_id not in self.model.jobs:
                for owner in (ALL, *OWNERS):
                    with pytest.raises(self.model.absent(function, job_id, owner) or AssertionError):
                        await self.store.get(function, job_id, owner)
        with pytest.raises(UnknownJob):
            await self.store.get("tone", "job-unknown")
        for function in FUNCTIONS:
            await self.check_function(function)
        waiting = [function for function in sorted(FUNCTIONS) if self.model.counts(function).in_queue]
        assert await self.store.functions_waiting() == waiting
        assert await self.store.next_expiry(self.model.now_s) == self.model.next_expiry()
        assert await self.database.read(deliveries) == self.model.events

    async def check_job(self, job_id: str, kept: ModelJob) -> None:
        job = await self.store.get(kept.new.function, job_id)
        assert (job.state, job.attempts, job.max_attempts, job.retries, job.due_s, job.expires_s) == (
            kept.state, kept.attempts, kept.max_attempts, kept.retries, kept.due_s, kept.expires_s,
        )  # fmt: skip
        assert (job.input, job.output, job.logs, job.progress, job.pieces, job.webhook, job.created_s) == (
            kept.new.input, kept.output, kept.logs, kept.progress, len(kept.pieces), kept.new.webhook,
            kept.created_s,
        )  # fmt: skip
        if kept.pieces:
            assert await self.store.pieces(job_id, 0, 100) == list(enumerate(kept.pieces, 1))

    async def check_function(self, function: str) -> None:
        due = await self.store.due(function, 100, self.model.now_s)
        assert [job.id for job in due] == self.model.due(function)
        assert await self.store.next_due(function) == self.model.next_due(function)
        for owner in (ALL, *OWNERS[1:]):
            assert await self.store.counts(function, owner) == self.model.counts(function, owner)
            ours = sorted(self.model.owned(function, owner).items(), key=lambda item: -item[1].number)
            found = await self.store.newest(function, owner=owner)
            assert [job.id for job in found] == [job_id for job_id, _ in ours]


StoreMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = StoreMachine.TestCase


# -- what the model does not cover


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def open_store(tmp_path: Path, clock: Clock) -> AsyncIterator[Callable[..., tuple[JobStore, Database]]]:
    databases: list[Database] = []

    def open_one(**more: Any) -> tuple[JobStore, Database]:
        databases.append(Database(tmp_path / "jobs.db", SCRIPTS))
        databases[-1].open()
        return JobStore(databases[-1], keep_s=KEEP_S, clock=clock, **more), databases[-1]

    yield open_one
    for database in databases:
        await asyncio.to_thread(database.close)


@pytest.fixture
def store(open_store: Callable[..., tuple[JobStore, Database]]) -> JobStore:
    return open_store()[0]


async def run_once(store: JobStore, job: Job) -> Job:
    fence = await store.take(job.id)
    assert fence is not None
    assert await store.finish(job.id, fence, DONE)
    return await store.get(job.function, job.id)


async def test_concurrent_duplicates_give_one_job(store: JobStore) -> None:
    results = await asyncio.gather(*(store.submit(new(idempotency="k")) for _ in range(200)))
    assert len({job.id for job, _ in results}) == 1
    assert sorted(replayed for _, replayed in results) == [False] + [True] * 199
    assert (await store.counts("tone")).in_queue == 1


async def test_an_idempotency_key_belongs_to_owner_and_function(store: JobStore) -> None:
    asked = [new(idempotency="k"), new(idempotency="k", owner="o"), new("echo", idempotency="k")]
    assert len({(await store.submit(each))[0].id for each in asked}) == 3
    with pytest.raises(IdempotencyConflict):
        await store.submit(new(idempotency="k", content_type="text/plain"))


async def test_a_full_queue_refuses_new_jobs_and_returns_repeated_ones(store: JobStore) -> None:
    jobs = [(await store.submit(new(idempotency=key, max_queued=2)))[0] for key in ("a", "b")]
    with pytest.raises(QueueFull, match="max_jobs "):
        await store.submit(new(max_queued=2))
    assert await store.submit(new(idempotency="a", max_queued=2)) == (jobs[0], True)
    await store.submit(new("echo", max_queued=2))
    await store.take(jobs[0].id)
    await store.submit(new(max_queued=2))
    assert (await store.counts("tone")) == JobCounts(in_queue=2, in_progress=1, queued_bytes=4)


async def test_a_queue_is_limited_in_bytes_too(store: JobStore) -> None:
    first, _ = await store.submit(new(body=b"x" * 200, max_queued_bytes=100))
    with pytest.raises(QueueFull, match="max_jobs_bytes "):
        await store.submit(new(body=b"x", max_queued_bytes=200))
    await store.take(first.id)
    second, _ = await store.submit(new(body=b"x" * 100, max_queued_bytes=200))
    await store.requeue(first.id, 1, FAILED, 0.0, counted=True)
    with pytest.raises(QueueFull):
        await store.submit(new(body=b"x", max_queued_bytes=300))
    await store.cancel("tone", second.id)
    await store.submit(new(body=b"x" * 100, max_queued_bytes=300))
    with pytest.raises(QueueFull):
        await store.submit(new(body=b"x", max_queued_bytes=300))


def insert_older(connection: sqlite3.Connection, asked: NewJob, job_id: str) -> None:
    schema.insert_job(connection, asked, asked.queued(job_id, 1_000_000.0))


async def test_the_queue_of_an_older_file_is_counted(
    open_store: Callable[..., tuple[JobStore, Database]], tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as older:
        older.executescript(f"{SCRIPTS[0]}; PRAGMA user_version=1;")
        older.row_factory = sqlite3.Row
        for number, body in enumerate((b"x" * 200, b"x" * 50)):
            insert_older(older, new(body=body), f"job-{number}")
        older.execute("INSERT INTO counters (function, in_queue) VALUES ('tone', 2), ('echo', 0)")
        older.commit()
    store, _ = open_store()
    assert await store.take("job-1") is not None
    found = [await store.counts(function) for function in ("tone", "echo")]
    assert [(counts.in_queue, counts.queued_bytes) for counts in found] == [(1, 200), (0, 0)]


async def test_the_jobs_and_deliveries_of_an_older_file_keep_their_owners(
    open_store: Callable[..., tuple[JobStore, Database]], tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as older:
        older.executescript(f"{SCRIPTS[0]}; {SCRIPTS[1]}; PRAGMA user_version=2;")
        for number, owner in enumerate(("", "key-1", "key-1", "key-2")):
            insert_older(older, new(body=b"x" * number, owner=owner), f"job-{number}")
            older.execute(
                "INSERT INTO deliveries VALUES (?, ?, 'tone', '', '', '', '', 'PENDING', 0, 0, 0, 0, '', '[]')",
                (f"msg_{number}", f"job-{number}"),
            )
        older.execute(
            "INSERT INTO counters (function, in_queue, queued_bytes, failed) VALUES ('tone', 4, 6, 9)"
        )
        older.commit()
    store, _ = open_store()
    await store.cancel("tone", "job-2")
    assert await store.counts("tone") == JobCounts(in_queue=3, cancelled=1, failed=9, queued_bytes=4)
    assert await store.counts("tone", "key-1") == JobCounts(in_queue=1, cancelled=1, queued_bytes=1)
    assert [delivery.id for delivery in await store.deliveries("tone", owner="key-2")] == ["msg_3"]
    assert len(await store.deliveries("tone")) == 4


@pytest.mark.parametrize("states", [(), (QUEUED,)])
async def test_an_owners_few_jobs_are_found_by_an_index(
    open_store: Callable[..., tuple[JobStore, Database]], states: tuple[JobState, ...]
) -> None:
    store, database = open_store()
    await store.submit(new(owner="key-1"))
    for asked in (
        lambda: store.newest("tone", states, owner="key-1"),
        lambda: store.deliveries("tone", owner="key-1"),
        lambda: store.purge("tone", "key-1"),
        lambda: store.counts("tone", "key-1"),
    ):
        said: list[str] = []
        await database.read(lambda connection, said=said: connection.set_trace_callback(said.append))
        await database.write(lambda connection, said=said: connection.set_trace_callback(said.append))
        await asked()
        # Only the statements that name the owner: the others do not look for jobs.
        plans = [
            await database.read(lambda connection, text=text: _plan(connection, text))
            for text in said
            if text.startswith("SELECT") and "key-1" in text
        ]
        assert plans
        assert all("owner=?" in plan for plan in plans), plans


def _plan(connection: sqlite3.Connection, statement: str) -> str:
    return " / ".join(row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}"))


async def test_all_fields_of_a_job_and_its_outcome_are_stored(store: JobStore, clock: Clock) -> None:
    clock.now_s = 5.0
    asked = new(
        body=b"\x00\xff", content_type="application/octet-stream", owner="key-1", priority=1, max_attempts=2,
        webhook=HOOK, traceparent="00-1", idempotency="\udcff",
    )  # fmt: skip
    job, _ = await store.submit(asked)
    assert {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)} == {
        **{field.name: getattr(job, field.name, None) for field in dataclasses.fields(asked)},
        "idempotency": "\udcff",
        "wanted_id": "",
    }
    clock.now_s = 6.0
    assert await store.take(job.id, "w1") == 1
    taken = dataclasses.replace(job, state=JobState.IN_PROGRESS, attempts=1, worker="w1", started_s=6.0)
    assert await store.get("tone", job.id) == taken
    outcome = JobOutcome(JobState.FAILED, b"\x01", "image/png", {"type": "handler_failed"}, "a line\n")
    clock.now_s = 7.0
    assert await store.finish(job.id, 1, outcome)
    done = dataclasses.replace(
        taken, state=JobState.FAILED, error={"type": "handler_failed"}, ended_s=7.0, expires_s=7.0 + KEEP_S
    )
    assert await store.get("tone", job.id) == dataclasses.replace(
        done, output=b"\x01", output_type="image/png", logs="a line\n"
    )
    assert await store.newest("tone") == [dataclasses.replace(done, input=b"")]


@pytest.mark.parametrize("webhook", [None, HOOK, Webhook(HOOK.url, ("logs",))])
async def test_the_writer_reads_no_needless_bodies(
    open_store: Callable[..., tuple[JobStore, Database]],
    webhook: Webhook | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notified: list[tuple[str, bytes | None]] = []
    monkeypatch.setattr(
        outbox, "add", lambda _connection, job, event, _now_s: notified.append((event, job.output))
    )
    store, database = open_store()
    job, _ = await store.submit(new(webhook=webhook))
    asked: list[str] = []
    await database.write(lambda connection: connection.set_trace_callback(asked.append))
    await store.take(job.id)
    await store.set_progress(job.id, 1, b"1")
    await store.add_pieces(job.id, 1, 1, [b"1"])
    await store.finish(job.id, 1, DONE)
    other, _ = await store.submit(new(webhook=webhook))
    await store.purge("tone")
    await database.write(lambda connection: connection.set_trace_callback(None))
    assert not [query for query in asked if query.startswith("SELECT") and "inputs.body" in query]
    events = ["start", "output", "output", "completed", "completed"] if webhook is HOOK else []
    assert [event for event, _ in notified] == events
    assert [output for _, output in notified if output] == [b'"done"'] * (webhook is HOOK)
    assert len([query for query in asked if "results.body" in query]) == len(events)
    assert (await store.get("tone", other.id)).state is JobState.CANCELLED


async def test_lists_have_pages_and_states(store: JobStore) -> None:
    jobs = [(await store.submit(new()))[0] for _ in range(6)]
    for job in jobs[:3]:
        await run_once(store, job)
    ids = [job.id for job in reversed(jobs)]
    assert [job.id for job in await store.newest("tone", limit=4)] == ids[:4]
    assert [job.id for job in await store.newest("tone", before_id=ids[3])] == ids[4:]
    assert [job.id for job in await store.newest("tone", [JobState.COMPLETED], 2)] == ids[3:5]
    with pytest.raises(UnknownJob):
        await store.newest("echo", before_id=ids[0])


async def test_only_a_final_state_ends_a_job(store: JobStore) -> None:
    job, _ = await store.submit(new())
    await store.take(job.id)
    with pytest.raises(JobConflict):
        await store.finish(job.id, 1, JobOutcome(JobState.IN_QUEUE))


async def test_an_id_with_surrogates_is_unknown(store: JobStore) -> None:
    with pytest.raises(UnknownJob):
        await store.get("tone", "job-\udcff")
    with pytest.raises(UnknownJob):
        await store.cancel("tone", "job-\udcff")


async def test_only_one_of_many_takers_gets_a_job(store: JobStore) -> None:
    job, _ = await store.submit(new())
    fences = await asyncio.gather(*(store.take(job.id, str(number)) for number in range(20)))
    assert sorted(fences, key=bool) == [None] * 19 + [1]


async def test_a_report_with_an_old_fence_changes_nothing(store: JobStore) -> None:
    job, _ = await store.submit(new())
    await store.take(job.id)
    await store.requeue(job.id, 1, FAILED, 0.0, counted=True)
    await store.take(job.id)
    assert not await store.finish(job.id, 1, DONE)
    assert not await store.set_progress(job.id, 1, b"1")
    assert not await store.add_pieces(job.id, 1, 1, [b"1"])
    assert not await store.requeue(job.id, 1, FAILED, 0.0, counted=True)
    assert (await store.get("tone", job.id)).state is JobState.IN_PROGRESS
    assert await store.finish(job.id, 2, DONE)
    assert not await store.finish(job.id, 2, JobOutcome(JobState.FAILED))
    assert (await store.get("tone", job.id)).output == b'"done"'


async def test_a_cancelled_submit_still_wakes_the_dispatcher(
    open_store: Callable[..., tuple[JobStore, Database]],
) -> None:
    woken = asyncio.Event()
    store, _ = open_store(on_commit=lambda _: woken.set())
    asked = asyncio.ensure_future(store.submit(new()))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait_for(woken.wait(), 20)
    assert (await store.counts("tone")).in_queue == 1


async def test_a_failure_of_the_outbox_undoes_the_transition(
    open_store: Callable[..., tuple[JobStore, Database]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise JobConflict("no")

    monkeypatch.setattr(outbox, "add", fail)
    notified: list[bool] = []
    store, _ = open_store(on_commit=lambda transaction: notified.append(transaction.notified))
    job, _ = await store.submit(new(webhook=Webhook(HOOK.url, ("completed",))))
    await store.take(job.id)
    with pytest.raises(JobConflict):
        await store.finish(job.id, 1, DONE)
    assert (await store.get("tone", job.id)).state is JobState.IN_PROGRESS
    assert (await store.counts("tone")) == JobCounts(in_progress=1)
    assert not any(notified)


async def test_a_purge_runs_in_slices_and_leaves_later_jobs(
    open_store: Callable[..., tuple[JobStore, Database]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotflame.runtime.jobs.transitions.PURGE_SLICE", 10)
    store, _ = open_store()
    await asyncio.gather(*(store.submit(new()) for _ in range(95)))
    purging = asyncio.ensure_future(store.purge("tone"))
    later = await asyncio.gather(*(store.submit(new("echo")) for _ in range(5)))
    assert await purging == 95
    assert (await store.counts("echo")).in_queue == len(later)


async def test_jobs_of_a_new_function_with_the_same_name_are_not_purged(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = await store.submit(new())
    await store.take(old.id)
    real = store._purge_slice

    async def meanwhile(*args: Any, **kwargs: Any) -> int:
        await store.take((await store.submit(new()))[0].id)
        return await real(*args, **kwargs)

    monkeypatch.setattr(store, "_purge_slice", meanwhile)
    assert await store.purge("tone", running=True) == 1
    assert (await store.get("tone", old.id)).state is JobState.CANCELLED
    counts = await store.counts("tone")
    assert (counts.in_progress, counts.cancelled) == (2, 1)


# -- expiry


async def expire_all(store: JobStore, clock: Clock) -> None:
    """Let two retention times pass and expire what is due."""
    clock.now_s += 2 * KEEP_S
    while await store.next_expiry(clock.now_s) <= clock.now_s:
        await store.expire()


async def test_expired_jobs_leave_nothing_and_the_file_shrinks(
    open_store: Callable[..., tuple[JobStore, Database]],
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transitions, "SPARE_PAGES", 10)
    store, database = open_store()
    jobs = await asyncio.gather(*(store.submit(new(body=b"x" * 20_000, webhook=HOOK)) for _ in range(200)))
    for job, _ in jobs:
        await store.take(job.id)
        await store.add_pieces(job.id, 1, 1, [b"piece"])
        await store.finish(job.id, 1, DONE)
    await database.write(lambda connection: connection.execute("UPDATE deliveries SET state = 'DELIVERED'"))
    await expire_all(store, clock)
    await expire_all(store, clock)

    def left(connection: sqlite3.Connection) -> dict[str, int]:
        tables = ("jobs", "inputs", "results", "pieces", "tombstones", "deliveries")
        return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in tables}

    assert not any((await database.read(left)).values())
    assert (await store.counts("tone")).completed == 200
    await asyncio.to_thread(database.close)
    assert (tmp_path / "jobs.db").stat().st_size < 400_000


async def test_a_pending_delivery_outlives_its_job(
    open_store: Callable[..., tuple[JobStore, Database]], clock: Clock
) -> None:
    store, database = open_store()
    job, _ = await store.submit(new(webhook=Webhook(HOOK.url)))
    await run_once(store, job)
    await expire_all(store, clock)
    assert await database.read(deliveries) == [(job.id, "completed")]
    await database.write(lambda connection: connection.execute("UPDATE deliveries SET state = 'DEAD'"))
    await store.expire()
    assert await database.read(deliveries) == []


async def test_tombstones_are_bounded(store: JobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "MAX_TOMBSTONES", 5)
    ids = [(await run_once(store, (await store.submit(new()))[0])).id for _ in range(8)]
    clock.now_s += KEEP_S + 1
    await store.expire()
    await store.expire()
    errors = await asyncio.gather(*(store.get("tone", job_id) for job_id in ids), return_exceptions=True)
    assert [type(error) for error in errors].count(JobExpired) == 5


async def test_an_expiry_slice_ends_when_it_took_long(
    store: JobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.gather(*(store.submit(new()) for _ in range(3)))
    monkeypatch.setattr(transitions, "EXPIRY_SLICE_S", -1.0)
    clock.now_s += 2000.0
    assert await store.expire() == 1


# -- query plans


@pytest.mark.parametrize(
    "call", ["get", "due", "next_due", "newest", "counts", "next_expiry", "take", "recover"]
)
async def test_nothing_scans_a_table(store: JobStore, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks SQLite's query plan of each statement of a call."""
    plans: list[str] = []

    class Explained:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def execute(self, query: str, values: Any = ()) -> sqlite3.Cursor:
            if query.startswith(("SELECT", "UPDATE", "DELETE")):
                plan = self.connection.execute(f"EXPLAIN QUERY PLAN {query}", values)
                plans.extend(row[3] for row in plan)
            return self.connection.execute(query, values)

    read, write = store._database.read, store._database.write
    monkeypatch.setattr(store._database, "read", lambda query: read(lambda c: query(Explained(c))))
    monkeypatch.setattr(
        store._database, "write", lambda change, committed: write(lambda c: change(Explained(c)), committed)
    )
    job, _ = await store.submit(new(idempotency="k"))
    calls = {
        "get": lambda: store.get("tone", job.id),
        "due": lambda: store.due("tone", 5, 1.0),
        "next_due": lambda: store.next_due("tone"),
        "newest": lambda: store.newest("tone", [JobState.FAILED, JobState.COMPLETED], 5, job.id),
        "counts": lambda: store.counts("tone"),
        "next_expiry": lambda: store.next_expiry(1.0),
        "take": lambda: store.take(job.id),
        "recover": store.recover,
    }
    await calls[call]()
    assert plans
    scans = [plan for plan in plans if plan.startswith("SCAN") and "tombstones" not in plan]
    assert not [plan for plan in scans if "INDEX" not in plan], plans


# -- the disk


async def test_a_full_disk_refuses_a_job_and_accepts_it_later(
    open_store: Callable[..., tuple[JobStore, Database]],
) -> None:
    store, database = open_store()
    job, _ = await store.submit(new())
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count=60").fetchall())
    with pytest.raises(JobStoreFailed, match="full"):
        await store.submit(new(body=b"x" * 1_000_000, idempotency="k"))
    assert (await store.counts("tone")).in_queue == 1
    assert (await run_once(store, job)).state is JobState.COMPLETED
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count=6000").fetchall())
    _, replayed = await store.submit(new(body=b"x" * 1_000_000, idempotency="k"))
    assert not replayed


def test_acknowledged_jobs_survive_a_kill(tmp_path: Path) -> None:
    """20 processes submit and finish jobs; each is killed at another moment."""
    path = tmp_path / "jobs.db"
    acknowledged: dict[str, list[str]] = {}
    for kill in range(20):
        command = [sys.executable, str(Path(__file__).with_name("submitter.py")), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(1 + 37 * kill % 150)]
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        assert all(lines)
        for line in lines:
            job_id, state, body = line.decode().split()
            acknowledged[job_id] = [state, body]
    asyncio.run(check_acknowledged(path, acknowledged))


async def check_acknowledged(path: Path, acknowledged: dict[str, list[str]]) -> None:
    database = Database(path, SCRIPTS)
    database.open()
    store = JobStore(database, keep_s=3600.0)
    await store.recover()
    assert acknowledged
    for job_id, (state, body) in acknowledged.items():
        job = await store.get("tone", job_id)
        assert job.input.decode() == body
        if state == JobState.COMPLETED:
            assert (job.state, job.output) == (JobState.COMPLETED, job.input)
    counts = await store.counts("tone")
    found = await database.read(
        lambda connection: dict(
            connection.execute("SELECT state, count(*) FROM jobs GROUP BY state").fetchall()
        )
    )
    assert found == {JobState.IN_QUEUE: counts.in_queue, JobState.COMPLETED: counts.completed}
    assert (
        await database.read(lambda connection: connection.execute("PRAGMA integrity_check").fetchone()[0])
        == "ok"
    )
    await asyncio.to_thread(database.close)

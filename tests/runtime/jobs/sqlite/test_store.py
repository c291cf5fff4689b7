"""What the model of the store does not cover: simultaneous callers, purges, expiry, kills and a full disk."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from example_count import examples
from job_store_tests import (
    DONE,
    HOOK,
    KEEP_S,
    Clock,
    JobStoreTests,
    new_job,
    run_once,
)
from pilotflame.errors import (
    JobConflict,
    JobExpired,
    JobStoreFailed,
    QueueFull,
)
from pilotflame.runtime.jobs.sql import outbox, transitions
from pilotflame.runtime.jobs.sqlite import store as sqlite
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored import large_bodies
from pilotflame.runtime.jobs.stored.job import JobCounts, JobState, Webhook


class TestJobStore(JobStoreTests):
    """Runs the tests of all stores on SQLite. conftest.py has the fixtures."""


class TestJobStoreWithFiles(JobStoreTests):
    """Runs the same tests, but stores all bodies of more than one byte in files."""

    @pytest.fixture(autouse=True)
    def files(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(large_bodies, "MOST_INLINE_BYTES", 1)


async def test_an_owner_leaves_places_in_the_queue_for_others(store: SqliteJobStore) -> None:
    """The jobs of an owner, and their bytes, may be at most 9 times what the queue still has room for afterwards."""
    for _ in range(90):
        await store.submit(new_job(owner="greedy", max_queued=100))
    with pytest.raises(QueueFull, match="your 90 jobs"):
        await store.submit(new_job(owner="greedy", max_queued=100))
    for owner in ("modest", ""):
        await store.submit(new_job(owner=owner, max_queued=100))
    size = new_job("echo", body=b"x" * 900, owner="greedy", max_queued_bytes=1000)
    await store.submit(size)
    with pytest.raises(QueueFull, match="your 900 bytes"):
        await store.submit(new_job("echo", body=b"x", owner="greedy", max_queued_bytes=1000))
    await store.submit(new_job("echo", body=b"x" * 100, owner="modest", max_queued_bytes=1000))


@pytest.mark.parametrize("webhook", [None, HOOK, Webhook(HOOK.url, ("logs",))])
async def test_the_writer_reads_no_needless_bodies(
    open_store: Callable[..., tuple[SqliteJobStore, Database]],
    webhook: Webhook | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notified: list[tuple[str, bytes | None]] = []
    monkeypatch.setattr(
        outbox, "add", lambda _connection, job, event, _now_s, _bodies: notified.append((event, job.output))
    )
    store, database = open_store()
    job, _ = await store.submit(new_job(webhook=webhook))
    asked: list[str] = []
    await database.write(lambda connection: connection.set_trace_callback(asked.append))
    await store.take(job.id)
    await store.set_progress(job.id, 1, b"1")
    await store.add_pieces(job.id, 1, 1, [b"1"])
    await store.finish(job.id, 1, DONE)
    other, _ = await store.submit(new_job(webhook=webhook))
    await store.purge("tone")
    await database.write(lambda connection: connection.set_trace_callback(None))
    assert not [query for query in asked if query.startswith("SELECT") and "inputs.body" in query]
    events = ["start", "output", "output", "completed", "completed"] if webhook is HOOK else []
    assert [event for event, _ in notified] == events
    assert [output for _, output in notified if output] == [b'"done"'] * (webhook is HOOK)
    assert len([query for query in asked if "results.body" in query]) == len(events)
    assert (await store.get("tone", other.id)).state is JobState.CANCELLED


async def test_a_cancelled_submit_still_wakes_the_dispatcher(
    open_store: Callable[..., tuple[SqliteJobStore, Database]],
) -> None:
    woken = asyncio.Event()
    store, _ = open_store()
    store.on_commit = lambda _: woken.set()
    asked = asyncio.ensure_future(store.submit(new_job()))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait_for(woken.wait(), 20)
    assert (await store.counts("tone")).in_queue == 1


async def test_a_failure_of_the_outbox_undoes_the_transition(
    open_store: Callable[..., tuple[SqliteJobStore, Database]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise JobConflict("no")

    monkeypatch.setattr(outbox, "add", fail)
    notified: list[bool] = []
    store, _ = open_store()
    store.on_commit = lambda changes: notified.append(changes.notified)
    job, _ = await store.submit(new_job(webhook=Webhook(HOOK.url, ("completed",))))
    await store.take(job.id)
    with pytest.raises(JobConflict):
        await store.finish(job.id, 1, DONE)
    assert (await store.get("tone", job.id)).state is JobState.IN_PROGRESS
    assert (await store.counts("tone")) == JobCounts(in_progress=1)
    assert not any(notified)


async def test_a_purge_runs_in_slices_and_leaves_later_jobs(
    open_store: Callable[..., tuple[SqliteJobStore, Database]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotflame.runtime.jobs.sql.transitions.PURGE_SLICE", 10)
    store, _ = open_store()
    await asyncio.gather(*(store.submit(new_job()) for _ in range(95)))
    purging = asyncio.ensure_future(store.purge("tone"))
    later = await asyncio.gather(*(store.submit(new_job("echo")) for _ in range(5)))
    assert await purging == 95
    assert (await store.counts("echo")).in_queue == len(later)


async def test_jobs_of_a_new_function_with_the_same_name_are_not_purged(
    store: SqliteJobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, _ = await store.submit(new_job())
    await store.take(old.id)
    real = store._purge_slice

    async def meanwhile(*args: Any, **kwargs: Any) -> int:
        await store.take((await store.submit(new_job()))[0].id)
        return await real(*args, **kwargs)

    monkeypatch.setattr(store, "_purge_slice", meanwhile)
    assert await store.purge("tone", running=True) == 1
    assert (await store.get("tone", old.id)).state is JobState.CANCELLED
    counts = await store.counts("tone")
    assert (counts.in_progress, counts.cancelled) == (2, 1)


# -- expiry


async def expire_all(store: SqliteJobStore, clock: Clock) -> None:
    """Let two retention times pass and expire what is due."""
    clock.now_s += 2 * KEEP_S
    while await store.next_expiry(clock.now_s) <= clock.now_s:
        await store.expire()


async def test_expired_jobs_leave_nothing_and_the_file_shrinks(
    open_store: Callable[..., tuple[SqliteJobStore, Database]],
    clock: Clock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sqlite, "SPARE_PAGES", 10)
    store, database = open_store()
    jobs = await asyncio.gather(
        *(store.submit(new_job(body=b"x" * 20_000, webhook=HOOK)) for _ in range(200))
    )
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
    open_store: Callable[..., tuple[SqliteJobStore, Database]], clock: Clock
) -> None:
    store, database = open_store()
    job, _ = await store.submit(new_job(webhook=Webhook(HOOK.url)))
    await run_once(store, job)
    await expire_all(store, clock)
    assert [(one.job_id, one.event) for one in await store.deliveries("tone")] == [(job.id, "completed")]
    await database.write(lambda connection: connection.execute("UPDATE deliveries SET state = 'DEAD'"))
    await store.expire()
    assert await store.deliveries("tone") == []


async def test_tombstones_are_bounded(
    store: SqliteJobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "MAX_TOMBSTONES", 5)
    ids = [(await run_once(store, (await store.submit(new_job()))[0])).id for _ in range(8)]
    clock.now_s += KEEP_S + 1
    await store.expire()
    await store.expire()
    errors = await asyncio.gather(*(store.get("tone", job_id) for job_id in ids), return_exceptions=True)
    assert [type(error) for error in errors].count(JobExpired) == 5


async def test_an_expiry_slice_ends_when_it_took_long(
    store: SqliteJobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await asyncio.gather(*(store.submit(new_job()) for _ in range(3)))
    monkeypatch.setattr(transitions, "EXPIRY_SLICE_S", -1.0)
    clock.now_s += 2000.0
    assert await store.expire() == 1


# -- the disk


async def test_a_full_disk_refuses_a_job_and_accepts_it_later(
    open_store: Callable[..., tuple[SqliteJobStore, Database]],
) -> None:
    store, database = open_store()
    job, _ = await store.submit(new_job())
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count=60").fetchall())
    with pytest.raises(JobStoreFailed, match="full"):
        await store.submit(new_job(body=b"x" * 250_000, idempotency="k"))
    assert (await store.counts("tone")).in_queue == 1
    assert (await run_once(store, job)).state is JobState.COMPLETED
    await database.write(lambda connection: connection.execute("PRAGMA max_page_count=6000").fetchall())
    _, replayed = await store.submit(new_job(body=b"x" * 250_000, idempotency="k"))
    assert not replayed


def test_acknowledged_jobs_survive_a_kill(tmp_path: Path) -> None:
    """Processes submit and finish jobs; each is killed at another moment."""
    path = tmp_path / "jobs.db"
    acknowledged: dict[str, list[str]] = {}
    for kill in range(examples(8)):
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
    store = SqliteJobStore(database, keep_s=3600.0)
    await store.requeue_dead()
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

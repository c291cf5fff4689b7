"""The tables of jobs: queries use the indexes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from job_store_tests import Clock, new_job
from jobs_model import QUEUED
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored.job import JobState


@pytest.mark.parametrize("states", [(), (QUEUED,)])
async def test_an_owners_few_jobs_are_found_by_an_index(
    open_store: Callable[..., tuple[SqliteJobStore, Database]], states: tuple[JobState, ...]
) -> None:
    store, database = open_store()
    await store.submit(new_job(owner="key-1"))
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
        # Check only statements that name the owner, because the other statements do not search for jobs.
        plans = [
            await database.read(lambda connection, text=text: _plan(connection, text))
            for text in said
            if text.startswith("SELECT") and "key-1" in text
        ]
        assert plans
        assert all("owner=?" in plan for plan in plans), plans


async def test_a_file_of_an_earlier_version_gets_incarnations_and_sizes(tmp_path: Path, clock: Clock) -> None:
    """The running jobs belong to no live gateway, so they are queued again. The sizes of all jobs are computed from their bodies."""
    path = tmp_path / "jobs.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"{SCRIPTS[11]}; PRAGMA user_version=12;")
        for number, state in enumerate(("IN_PROGRESS", "IN_QUEUE"), 1):
            connection.execute(
                "INSERT INTO jobs (number, id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, "
                "allowed, max_attempts, attempts, created_s, stale_s, worker, traceparent) "
                "VALUES (?, ?, 'tone', ?, '', 0, '', 60, 1000, 3, 3, 1, 1, ?, 'w1', '')",
                (number, f"job-{number}", state, clock.now_s + 1000.0),
            )
            connection.execute("INSERT INTO inputs VALUES (?, x'', '300000-0-0')", (number,))
            connection.execute(
                "INSERT INTO results VALUES (?, '', 'a' || char(0) || 'b', x'00ff', x'05', '7-0-0')",
                (number,),
            )
            connection.execute("INSERT INTO pieces VALUES (?, 1, x'0102')", (number,))
        connection.execute(
            "INSERT INTO counters (function, owner, in_progress, in_queue) VALUES ('tone', '*', 1, 1)"
        )
        connection.commit()
    store = SqliteJobStore(Database(path, SCRIPTS), keep_s=60.0, clock=clock)
    await store.open()
    sizes = await store._database.read(
        lambda connection: connection.execute("SELECT size, result_size FROM jobs").fetchall()
    )
    assert [tuple(row) for row in sizes] == [(300_000, 3 + 2 + 1 + 7 + 2)] * 2
    logs = await store._database.read(
        lambda connection: connection.execute("SELECT logs FROM results").fetchone()[0]
    )
    assert logs == b"a\0b"
    assert await store.take("job-1", "w1") is None
    assert await store.requeue_dead() == (1, 0)
    assert [await store.take(f"job-{number}", "w1") for number in (1, 2)] == [2, 2]
    assert await store.requeue_dead() == (0, 0)
    await store.close()


def _plan(connection: sqlite3.Connection, statement: str) -> str:
    return " / ".join(row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}"))


@pytest.mark.parametrize(
    "call", ["get", "claim", "next_due", "newest", "counts", "next_expiry", "take", "requeue_dead"]
)
async def test_nothing_scans_a_table(
    store: SqliteJobStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check SQLite's query plan of each statement of a call."""
    plans: list[str] = []

    class Explained:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection

        def execute(self, query: str, values: Any = ()) -> sqlite3.Cursor:
            if query.startswith(("SELECT", "UPDATE", "DELETE")):
                plan = self.connection.execute(f"EXPLAIN QUERY PLAN {query}", values)
                plans.extend(row[3] for row in plan)
            return self.connection.execute(query, values)

        def insert(self, query: str, values: Any) -> int | None:
            return self.connection.insert(query, values)

    read, write = store._database.read, store._database.write
    monkeypatch.setattr(store._database, "read", lambda query: read(lambda c: query(Explained(c))))
    monkeypatch.setattr(
        store._database,
        "write",
        lambda change, committed, **_more: write(lambda c: change(Explained(c)), committed),
    )
    job, _ = await store.submit(new_job(idempotency="k"))
    calls = {
        "get": lambda: store.get("tone", job.id),
        "claim": lambda: store.claim("tone", 5, 1.0),
        "next_due": lambda: store.next_due("tone"),
        "newest": lambda: store.newest("tone", [JobState.FAILED, JobState.COMPLETED], 5, job.id),
        "counts": lambda: store.counts("tone"),
        "next_expiry": lambda: store.next_expiry(1.0),
        "take": lambda: store.take(job.id),
        "requeue_dead": store.requeue_dead,
    }
    await calls[call]()
    assert plans
    scans = [plan for plan in plans if plan.startswith("SCAN") and "tombstones" not in plan]
    assert not [plan for plan in scans if "INDEX" not in plan], plans

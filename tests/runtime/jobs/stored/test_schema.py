"""The tables of jobs: files of older versions are brought up to date, and queries use the indexes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from job_store_tests import new_job
from jobs_model import QUEUED
from pilotflame.runtime.jobs.stored import schema
from pilotflame.runtime.jobs.stored.database import Database
from pilotflame.runtime.jobs.stored.job import JobCounts, JobState, NewJob
from pilotflame.runtime.jobs.stored.schema import SCRIPTS
from pilotflame.runtime.jobs.stored.store import JobStore


def insert_older(connection: sqlite3.Connection, asked: NewJob, job_id: str) -> None:
    older = tuple(name for name in schema._PLAIN_FIELDS if name != "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schema, "_PLAIN_FIELDS", older)
        schema.insert_job(connection, asked, asked.queued(job_id, 1_000_000.0))


async def test_the_queue_of_an_older_file_is_counted(
    open_store: Callable[..., tuple[JobStore, Database]], tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as older:
        older.executescript(f"{SCRIPTS[0]}; PRAGMA user_version=1;")
        older.row_factory = sqlite3.Row
        for number, body in enumerate((b"x" * 200, b"x" * 50)):
            insert_older(older, new_job(body=body), f"job-{number}")
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
            insert_older(older, new_job(body=b"x" * number, owner=owner), f"job-{number}")
            older.execute(
                "INSERT INTO deliveries VALUES (?, ?, 'tone', '', '', '', '', 'PENDING', 0, 0, 0, 0, '', '[]')",
                (f"msg_{number}", f"job-{number}"),
            )
        older.execute(
            "INSERT INTO counters (function, in_queue, queued_bytes, failed) VALUES ('tone', 4, 6, 9)"
        )
        older.commit()
        older.execute("INSERT INTO results VALUES (2, 'text/plain', 'log', 'four')")
        older.execute("INSERT INTO pieces VALUES (3, 1, 'piece')")
        older.commit()
    store, _ = open_store()
    assert await store.stored_bytes() == {"*": 18, "key-1": 15, "key-2": 3}
    await store.cancel("tone", "job-2")
    assert await store.counts("tone") == JobCounts(in_queue=3, cancelled=1, failed=9, queued_bytes=4)
    assert await store.counts("tone", "key-1") == JobCounts(in_queue=1, cancelled=1, queued_bytes=1)
    (theirs,) = await store.deliveries("tone", owner="key-2")
    assert (theirs.id, theirs.subject, theirs.job_id) == ("msg_3", "job:job-3", "job-3")
    assert len(await store.deliveries("tone")) == 4


@pytest.mark.parametrize("states", [(), (QUEUED,)])
async def test_an_owners_few_jobs_are_found_by_an_index(
    open_store: Callable[..., tuple[JobStore, Database]], states: tuple[JobState, ...]
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
    job, _ = await store.submit(new_job(idempotency="k"))
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

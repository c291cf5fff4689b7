"""The tables of jobs: queries use the indexes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import pytest
from job_store_tests import new_job
from jobs_model import QUEUED
from pilotflame.runtime.jobs.sqlite.database import Database
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
async def test_nothing_scans_a_table(
    store: SqliteJobStore, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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

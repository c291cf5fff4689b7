"""The transitions of stored jobs: they follow the model of a store, and an expiry takes a limited time."""

from __future__ import annotations

from itertools import count

import pytest
from example_count import examples
from hypothesis import HealthCheck, settings
from job_store_machine import StoreMachine
from job_store_tests import KEEP_S, Clock, new_job
from pilotflame.runtime.jobs.sql import rows, transitions
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore


class SqliteMachine(StoreMachine):
    """Compares the store on SQLite with the model. At the end, the rows must name all files of large bodies."""

    def make_store(self) -> SqliteJobStore:
        self.database = Database(self.folder / "jobs.db", SCRIPTS)
        return SqliteJobStore(self.database, keep_s=KEEP_S, clock=lambda: self.model.now_s)

    def close(self) -> None:
        named = set(self.run(self.database.read(rows.large_bodies)))
        super().close()
        assert {path.name for path in self.folder.glob("jobs.bodies/*")} == named


SqliteMachine.TestCase.settings = settings(
    max_examples=examples(8), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStore = SqliteMachine.TestCase


class FilesMachine(SqliteMachine):
    """Run SqliteMachine, but store all bodies of more than two bytes in files."""

    most_inline = 2


FilesMachine.TestCase.settings = SqliteMachine.TestCase.settings
TestStoreWithFiles = FilesMachine.TestCase


@pytest.mark.parametrize(("step_s", "handled"), [(0.0, [5]), (1.0, [1, 1, 1, 1, 1])])
async def test_a_transaction_expires_more_jobs_until_its_time_is_up(
    store: SqliteJobStore, clock: Clock, monkeypatch: pytest.MonkeyPatch, step_s: float, handled: list[int]
) -> None:
    for _ in range(5):
        await store.submit(new_job(ttl_s=1.0))
    clock.now_s += 2.0
    # Each call of `monotonic` returns a time that is later by `step_s`.
    monkeypatch.setattr(transitions.time, "monotonic", count(0.0, step_s).__next__)
    assert [await store.expire(100) for _ in handled] == handled
    assert await store.expire(100) == 0

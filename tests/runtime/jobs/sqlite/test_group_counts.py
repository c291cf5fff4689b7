"""Changes that are run together return and store the same as changes that are run one by one."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from grouped_calls import DONE, TABLES, Call, Together, Twin, compare_twins
from job_store_tests import KEEP_S, Clock, new_job
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.group_counts import GroupCounts, run_together
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore


class SqliteTwin(Twin):
    def __init__(self, path: Path, clock: Clock, together: Any) -> None:
        self.path = path
        database = Database(path, SCRIPTS)
        super().__init__(SqliteJobStore(database, keep_s=KEEP_S, clock=clock, together=together), clock)

    def call(self, name: str, arguments: tuple[Any, ...]) -> Awaitable[Any]:
        # A claim only reads, in another thread. It may read the rows before or after the group.
        return asyncio.sleep(0) if name == "claim" else super().call(name, arguments)

    def read(self, table: str, columns: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f"SELECT {columns} FROM {table}")]

    def clear(self) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for table in TABLES:
                connection.execute(f"DELETE FROM {table}")
            connection.execute("INSERT INTO stored VALUES ('*', 0)")


def twins(folder: Path, clock: Clock, together: Any) -> list[SqliteTwin]:
    return [
        SqliteTwin(folder / f"{name}.sqlite3", clock, how)
        for name, how in (("one", together), ("other", None))
    ]


def test_together_is_the_same_as_one_by_one(tmp_path: Path) -> None:
    clock, together = Clock(), Together(run_together)
    with asyncio.Runner() as runner:
        pair = twins(tmp_path, clock, together)
        for twin in pair:
            runner.run(twin.store.open())
        compare_twins(runner, pair, clock)
        for twin in pair:
            runner.run(twin.store.close())
    assert max(together.sizes) > 4
    assert not together.failed


async def test_a_group_is_run_again_if_a_change_fails_after_it_has_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = Together(run_together)
    pair = twins(tmp_path, Clock(), together)
    add_bytes = GroupCounts.add_bytes

    def full(counts: GroupCounts, owner: str, added: int) -> None:
        add_bytes(counts, owner, added)
        if added == len(b"large"):
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(GroupCounts, "add_bytes", full)
    group: list[Call] = [
        ("submit", (new_job(), "j1")),
        ("submit", (new_job(body=b"large"), "j2")),
        ("take", ("j1", "w1")),
        ("finish", ("j1", 1, DONE)),
    ]
    for twin in pair:
        await twin.store.open()
    answers = [await twin.group(group) for twin in pair]
    assert answers[0] == answers[1]
    assert pair[0].rows() == pair[1].rows()
    assert [str(error) for error in together.failed] == ["database or disk is full"]
    for twin in pair:
        await twin.store.close()

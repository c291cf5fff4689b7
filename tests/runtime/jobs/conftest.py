"""Fixtures of the tests of jobs: stores on a file, with a clock that the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from job_store_tests import KEEP_S, Clock, MakeStore
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture
async def open_store(
    tmp_path: Path, clock: Clock
) -> AsyncIterator[Callable[..., tuple[SqliteJobStore, Database]]]:
    databases: list[Database] = []

    def open_one(**more: Any) -> tuple[SqliteJobStore, Database]:
        databases.append(Database(tmp_path / "jobs.db", SCRIPTS))
        databases[-1].open()
        return SqliteJobStore(databases[-1], keep_s=KEEP_S, clock=clock, **more), databases[-1]

    yield open_one
    for database in databases:
        await asyncio.to_thread(database.close)


@pytest.fixture
def make_store(open_store: Callable[..., tuple[SqliteJobStore, Database]]) -> MakeStore:
    """Return a function that opens another store on the same file. Earlier stores stay open, as if their gateway was killed."""

    async def make() -> SqliteJobStore:
        return open_store()[0]

    return make


@pytest.fixture
def store(open_store: Callable[..., tuple[SqliteJobStore, Database]]) -> SqliteJobStore:
    return open_store()[0]

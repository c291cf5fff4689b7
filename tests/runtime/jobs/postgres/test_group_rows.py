"""Changes that are run together return and store the same as changes that are run one by one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from grouped_calls import TABLES, Call, Together, Twin, compare_twins
from job_store_tests import KEEP_S, Clock, new_job
from pilotflame.runtime.jobs.postgres import group_rows
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.group_rows import run_together
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.stored import large_bodies
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState
from postgres import PostgresServer, new_schema


class PostgresTwin(Twin):
    def __init__(self, url: str, clock: Clock, together: Any) -> None:
        self.url = url
        super().__init__(
            PostgresJobStore(PostgresDatabase(url), keep_s=KEEP_S, clock=clock, together=together), clock
        )

    def read(self, table: str, columns: str) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, row_factory=psycopg.rows.dict_row) as connection:
            return connection.execute(f"SELECT {columns} FROM {table}".encode()).fetchall()

    def clear(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"TRUNCATE {', '.join(TABLES)} CASCADE".encode())
            connection.execute("INSERT INTO stored VALUES ('*', 0)")


@asynccontextmanager
async def twins(postgres: PostgresServer, clock: Clock, together: Any) -> AsyncIterator[list[PostgresTwin]]:
    made = [
        PostgresTwin(new_schema(postgres.url, f"t{secrets.token_hex(8)}"), clock, how)
        for how in (together, None)
    ]
    for twin in made:
        await twin.store.open()
    yield made
    for twin in made:
        await twin.store.close()


@pytest.mark.parametrize("most_bytes", [group_rows.MOST_BYTES, 2])
def test_together_is_the_same_as_one_by_one(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(group_rows, "MOST_BYTES", most_bytes)
    clock, together = Clock(), Together(run_together)
    with asyncio.Runner() as runner:
        context = twins(postgres, clock, together)
        pair = runner.run(context.__aenter__())
        compare_twins(runner, pair, clock)
        runner.run(context.__aexit__(None, None, None))
    assert max(together.sizes) > 4
    assert not together.failed


async def test_a_change_that_the_database_refuses_does_not_harm_the_others(
    postgres: PostgresServer, clock: Clock
) -> None:
    together = Together(run_together)
    async with twins(postgres, clock, together) as pair:
        group: list[Call] = [
            ("submit", (new_job(), "j1")),
            ("submit", (new_job(content_type="\x00"), "j2")),
            ("submit", (new_job(content_type="\udcff"), "j3")),
            ("take", ("j1", "w1")),
            ("take", ("j\udcff", "w1")),
        ]
        answers = [await twin.group(group) for twin in pair]
        assert answers[0] == answers[1]
        assert answers[0][3:] == [1, None]
        assert pair[0].rows() == pair[1].rows()
    assert together.failed


async def test_large_bodies_are_not_in_the_rows(
    postgres: PostgresServer, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_bodies, "MOST_INLINE_BYTES", 1)
    async with twins(postgres, clock, run_together) as pair:
        for twin in pair:
            await twin.store.submit(new_job(body=b"large"), "j1")
            assert await twin.store.take("j1") == 1
            assert await twin.store.finish("j1", 1, JobOutcome(JobState.COMPLETED, b"also large"))
            assert (await twin.store.get("tone", "j1")).input == b"large"
        found = [twin.rows() for twin in pair]
        for rows in found:
            for table in ("inputs", "results"):
                assert rows[table][0].pop("large")
                assert not rows[table][0]["body"]
        assert found[0] == found[1]

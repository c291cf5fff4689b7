"""Fixtures of the tests of jobs on PostgreSQL: a server, and stores in a schema of their own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psycopg
import pytest
import pytest_asyncio
from job_store_tests import KEEP_S, Clock, MakeStore
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.stored.large_bodies import LargeBodies
from postgres import PostgresServer, new_schema, postgres_server


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def url(server: PostgresServer) -> str:
    return new_schema(server.url, f"t{secrets.token_hex(8)}")


@pytest_asyncio.fixture
async def make_store(url: str, tmp_path: Path, clock: Clock) -> AsyncIterator[MakeStore]:
    """The leases of the earlier gateways have ended."""
    stores: list[PostgresJobStore] = []

    async def make() -> PostgresJobStore:
        stores.append(
            PostgresJobStore(
                PostgresDatabase(url), LargeBodies(tmp_path / "bodies"), keep_s=KEEP_S, clock=clock
            )
        )
        await stores[-1].open()
        join(url, stores[-1].incarnation)
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


def join(url: str, incarnation: str, *, alone: bool = True) -> None:
    """Give a gateway a lease. If `alone`, end all others."""
    with psycopg.connect(url, autocommit=True) as connection:
        if alone:
            connection.execute("UPDATE nodes SET until = now()")
        connection.execute(
            "INSERT INTO nodes (incarnation, name, version, until) VALUES (%s, 'n', '1', now() + interval '1 hour')",
            [incarnation],
        )


@pytest_asyncio.fixture
async def store(make_store: MakeStore) -> PostgresJobStore:
    return await make_store()

"""Fixtures of the tests of jobs on PostgreSQL: a server, and stores in a schema of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from job_store_tests import KEEP_S, Clock, MakeStore
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from postgres import join


@pytest_asyncio.fixture
async def make_store(postgres_url: str, clock: Clock) -> AsyncIterator[MakeStore]:
    """Yield a function that opens the store of a new gateway, and ends the leases of all earlier gateways."""
    stores: list[PostgresJobStore] = []

    async def make() -> PostgresJobStore:
        stores.append(PostgresJobStore(PostgresDatabase(postgres_url), keep_s=KEEP_S, clock=clock))
        await stores[-1].open()
        join(postgres_url, stores[-1].incarnation)
        return stores[-1]

    yield make
    for store in stores:
        await store.close()


@pytest_asyncio.fixture
async def store(make_store: MakeStore) -> PostgresJobStore:
    return await make_store()

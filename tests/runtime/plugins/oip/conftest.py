"""A gateway for all tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from oip_server import Server, oip_server


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def server() -> AsyncIterator[Server]:
    async with oip_server() as found:
        yield found

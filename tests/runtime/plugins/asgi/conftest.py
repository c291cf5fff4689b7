"""Deploys web apps."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio
from live import Function, Gateway


@pytest_asyncio.fixture(loop_scope="module")
async def deploy_app(gateway: Gateway) -> AsyncIterator[Callable[..., Any]]:
    """`await deploy_app(source, **settings)` deploys the `app` in this source until the test ends."""
    names: list[str] = []

    async def deployed(source: str, settings: dict[str, Any] | None = None, **how: Any) -> Function:
        given = {"asgi": "app:app", **(settings or {})}
        files = {"app.py": source, **how.pop("files", {})}
        function = await gateway.deploy(None, given, files=files, **how)
        names.append(function.name)
        return function

    yield deployed
    for name in set(names):
        await gateway.client.delete(f"/v1/functions/{name}")

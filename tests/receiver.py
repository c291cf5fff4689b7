"""A receiver of webhooks for tests: an HTTP server on loopback that records requests and sends prepared responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from live import LIMIT_S
from pilotflame.runtime.jobs.sql.group_commit import Change, T
from pilotflame.runtime.jobs.sql.outbox import newest
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.stored.job import Job, JobState, Webhook
from pilotflame.runtime.jobs.webhooks.delivery import Delivery

Response = int | Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Came:
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def event(self) -> str:
        return str(json.loads(self.body)["type"])


class Receiver:
    """Sends `responses` in order, then 204."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.responses: list[Response] = []
        self.came: list[Came] = []
        self._changed = asyncio.Condition()

    async def take(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.came.append(Came(request.path, headers, body))
        async with self._changed:
            self._changed.notify_all()
        response = self.responses.pop(0) if self.responses else 204
        return web.Response(status=response) if isinstance(response, int) else await response(request)

    async def received(self, count: int) -> list[Came]:
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: len(self.came) >= count)
        return self.came


@asynccontextmanager
async def receiving(host: str = "127.0.0.1") -> AsyncIterator[Receiver]:
    app = web.Application()
    # A timeout of 0 would wait forever for handlers whose response a test holds back.
    runner = web.AppRunner(app, shutdown_timeout=0.01, access_log=None)
    receiver = Receiver("")
    app.router.add_route("*", "/{tail:.*}", receiver.take)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    port = runner.addresses[0][1]
    receiver.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


class Held:
    """A response that is sent when `let_go` is set."""

    def __init__(self, status: int = 204) -> None:
        self.status = status
        self.let_go = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.Response:
        await self.let_go.wait()
        return web.Response(status=self.status)


async def reset(request: web.Request) -> web.Response:
    """Break the connection instead of sending a response."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def respond(status: int, **headers: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def responded(request: web.Request) -> web.Response:
        return web.Response(status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})

    return responded


class Watched(Database):
    """A database that tells tests of each write. Without it, tests would have to sleep."""

    async def write(self, change: Change[T]) -> T:
        result = await super().write(change)
        async with self._condition:
            self._condition.notify_all()
        return result

    @property
    def _condition(self) -> asyncio.Condition:
        return self.__dict__.setdefault("_changed", asyncio.Condition())

    async def until(self, holds: Callable[[list[Delivery]], bool], function: str = "f") -> list[Delivery]:
        """Wait until the deliveries satisfy `holds` and return them, newest first."""
        async with asyncio.timeout(LIMIT_S), self._condition:
            while not holds(found := await self.read(lambda connection: newest(connection, function))):
                await self._condition.wait()
        return found


def job(url: str = "http://127.0.0.1:1/hook", **fields: Any) -> Job:
    """Return a running job of function "f" whose webhook subscribes to all events."""
    return Job(
        **{
            "id": "job-1", "function": "f", "state": JobState.IN_PROGRESS, "input": b"{}", "content_type": "", "owner": "",
            "priority": 0, "execution_timeout_s": 60.0, "ttl_s": 60.0, "max_attempts": 3, "created_s": 100.0,
            "webhook": Webhook(url, ("start", "output", "logs", "completed")), **fields,
        }
    )  # fmt: skip

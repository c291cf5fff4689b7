"""Several gateways with one PostgreSQL database behind a proxy: each request goes to the next gateway.

With PILOTFLAME_TEST_GATEWAYS=3, `live.gateway_here` returns three gateways behind a proxy, so suites of foreign clients run against them:

    PILOTFLAME_TEST_GATEWAYS=3 python -m pytest tests/runtime/plugins/runpod

Tests that look into the process or the state folder of a gateway, and tests of what each gateway does for itself, are deselected: see
ONE_GATEWAY. A second gateway on the same state folder has the same database. The address of the proxy is the address of the gateways,
and `server` is the server of the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web
from live import Function, Gateway, one_gateway_here, until
from multidict import CIMultiDict
from yarl import URL

GATEWAYS = int(os.environ.get("PILOTFLAME_TEST_GATEWAYS", "1"))
_LOOKS = "looks into the process or the state folder of the gateway"
_SCALE = "scale.max counts on each gateway for itself"
_OWN = "counts what one worker, or one gateway, does"
ONE_GATEWAY: dict[str, str] = {
    "runpod/test_routes.py::test_a_job_that_waits_too_long_times_out": _SCALE,
    "runpod/test_routes.py::test_the_queue_is_purged": _SCALE,
    "runpod/test_routes.py::test_nothing_waits_for_a_cold_start": _OWN,
    "runpod/test_routes.py::test_low_priority_goes_last": "each gateway runs the jobs that it has claimed in the order of their priorities",
    "runpod/test_routes.py::test_a_stream_that_breaks_off_ends_with_an_error_event": _LOOKS,
    "runpod/test_openai_jobs.py::test_polls_encode_each_piece_once": _OWN,
    "runpod/test_handler.py::test_error_and_refresh": _OWN,
    "runpod/test_handler.py::test_the_concurrency_modifier_is_followed": _OWN,
    "replicate/test_routes.py::test_a_file_that_has_lost_its_content": _LOOKS,
    "kafka/test_topic.py::test_a_functions_answers_go_to_another_topic": "the gateway that has the duty shows the state of a source",
    "openai/test_pypi_client.py::test_tokens_are_in_the_usage_and_the_metrics": _OWN,
    "openai/test_encodings.py": "its weights are on this machine only",
    "cog/test_cog_cases.py::test_setup_healthcheck": _OWN,
    "cog/test_handler.py::test_async_predictors_run_side_by_side": _OWN,
    "cog/test_handler.py::test_cog_yaml_says_how_many_run_at_once": _OWN,
    "cog/test_routes.py::test_health": _OWN,
    "sagemaker/test_async_answers.py::test_places_that_the_policy_does_not_list_are_refused": _LOOKS,
    "sagemaker/test_async_answers.py::test_a_store_that_never_answers_holds_up_its_own_function_only": _OWN,
}
"""Why tests cannot run with several gateways. A key is a part of a test's id, without parameters."""
_OF_CONNECTION = ("Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade", "Expect", "TE", "Trailer")
_ADDED = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
_LONGEST = 1 << 20


class RoundRobin:
    """A reverse proxy. It streams bodies in both directions. If one side breaks its connection, the proxy
    breaks the other one.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._turns = itertools.cycle(urls)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Serve inside the block. Yield the address."""
        connector, patience = TCPConnector(limit=0, force_close=True), ClientTimeout(None)
        async with ClientSession(
            connector=connector, timeout=patience, auto_decompress=False, skip_auto_headers=_ADDED,
            max_line_size=_LONGEST, max_field_size=_LONGEST,
        ) as self._session:  # fmt: skip
            server = web.Server(
                self._pass_on, handler_cancellation=True, access_log=None, auto_decompress=False,
                max_line_size=_LONGEST, max_field_size=_LONGEST,
            )  # fmt: skip
            runner = web.ServerRunner(server, shutdown_timeout=0.1)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                host, port = runner.addresses[0][:2]
                yield f"http://{host}:{port}"
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            await self._exchange(request, response)
        except (ClientError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        return response

    async def _exchange(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        url = URL(next(self._turns) + request.raw_path, encoded=True)
        body = request.content if request.can_read_body else None
        asked = self._session.request(
            request.method, url, headers=_without(request.headers), data=body, allow_redirects=False
        )
        async with asked as answer:
            response.set_status(answer.status, answer.reason)
            response.headers.extend(_without(answer.headers))
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()


def _without(headers: Any) -> CIMultiDict[str]:
    found = CIMultiDict(headers)
    for name in _OF_CONNECTION:
        found.popall(name, None)
    return found


class _SharedFunction(Function):
    """A function of several gateways. Each gateway has its own log of it."""

    gateways: Sequence[Gateway]

    async def logged(self, text: str) -> dict[str, Any]:
        logs = [asyncio.create_task(one.function(self.name).logged(text)) for one in self.gateways]
        try:
            done, _ = await asyncio.wait(logs, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for one in logs:
                one.cancel()
            await asyncio.gather(*logs, return_exceptions=True)


class SeveralGateways(Gateway):
    """Gateways behind a proxy."""

    def __init__(self, url: str, gateways: Sequence[Gateway], database: str) -> None:
        super().__init__(url, gateways[0].state)
        self.gateways, self.database = gateways, database
        self.server = gateways[0].server
        self.client.event_hooks["response"].append(self._spread)

    async def deploy(self, *args: Any, **how: Any) -> Function:
        function = await super().deploy(*args, **how)
        for one in self.gateways:
            if one.server is not None and one.keeps_bases:
                await one.keep_base(one.server.node.revisions, function.name)
        return function

    def function(self, name: str, described: dict[str, Any] | None = None) -> Function:
        found = _SharedFunction(name, self.client, described or {})
        found.gateways = self.gateways
        return found

    def rows(self, statement: str) -> list[Any]:
        """Return the rows that a statement returns in the database."""
        with pytest.importorskip("psycopg").connect(self.database, autocommit=True) as connection:
            return list(connection.execute(statement.encode()))

    def at_home(self) -> httpx.AsyncClient:
        client = super().at_home()
        client.event_hooks["response"].append(self._spread)
        return client

    async def _spread(self, response: httpx.Response) -> None:
        """Wait until all gateways have a new key or secret: they follow it soon, but the response does not
        wait for them.
        """
        path = response.request.url.path
        if response.request.method in ("POST", "PUT", "DELETE") and response.is_success:
            if path.startswith("/v1/keys"):
                await self.same("/v1/keys")
            elif "/secrets/" in path:
                await self.same(path.rpartition("/")[0])

    async def same(self, path: str) -> None:
        """Wait until all gateways answer the same for a path."""

        async def is_same() -> bool:
            found = []
            for one in self.gateways:
                async with one.at_home() as home:
                    found.append((await home.get(path)).text)
            return len(set(found)) == 1

        await until(is_same, f"the same {path} on all gateways")


_server_url = ""
_databases: dict[Path, str] = {}


def use(postgres_url: str) -> None:
    """Create the databases of later gateways on this server."""
    global _server_url  # noqa: PLW0603
    _server_url = postgres_url


@contextlib.asynccontextmanager
async def gateways_here(
    state: Path, count: int = GATEWAYS, *, keep_bases: bool = True, database: str = "", **settings: Any
) -> AsyncIterator[SeveralGateways]:
    """Run `count` gateways on this event loop, behind a proxy. Without `database`, they get a new one, which
    belongs to the state folder.
    """
    # Import `postgres` here, because pytest must be the first to load it, as a plugin, but imports this module earlier.
    from postgres import new_schema

    if not database and state not in _databases:
        _databases[state] = new_schema(_server_url, f"s{secrets.token_hex(8)}")
    settings |= {"database": database or _databases[state], "keep_bases": keep_bases}
    states = [state, *(state.with_name(f"{state.name}{number}") for number in range(2, count + 1))]
    async with contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(one_gateway_here(one, **settings)) for one in states]
        url = await stack.enter_async_context(RoundRobin([one.url for one in gateways]).listening())
        several = SeveralGateways(url, gateways, database or _databases[state])
        for one in gateways:
            await _knows(one, count)
        async with several.client:
            yield several


async def _knows(gateway: Gateway, count: int) -> None:
    async def does() -> bool:
        async with gateway.at_home() as home:
            nodes = (await home.get("/v1/nodes")).json()["nodes"]
        return bool(sum(one["alive"] for one in nodes) == count)

    await until(does, f"{count} gateways")


def why_one(test_id: str) -> str:
    """Return why a test cannot run with several gateways; "" if it can."""
    name = test_id.partition("[")[0]
    return next((why for part, why in ONE_GATEWAY.items() if part in name), "") if GATEWAYS > 1 else ""

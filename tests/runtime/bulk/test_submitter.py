"""The submitter against a gateway that is busy, slow, away for a moment, or away for good."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pilotflame.errors import Forbidden, GatewayError
from pilotflame.runtime.bulk.inputs import InputLine
from pilotflame.runtime.bulk.submitter import dumped, open_submitter

Answer = Callable[[web.Request], Awaitable[web.Response]]
LINE = InputLine(7, "in.jsonl, line 7", b'{"a": 1}', 9)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Answer], Awaitable[str]]]:
    servers: list[TestServer] = []

    async def served(answer: Answer) -> str:
        app = web.Application()
        app.router.add_post("/v2/{function}/runsync", answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("/"))

    yield served
    for server in servers:
        await server.close()


async def test_it_retries_with_one_key_until_the_job_ends(serve) -> None:
    requests: list[tuple[str, dict[str, object]]] = []

    async def answer(request: web.Request) -> web.Response:
        requests.append((request.headers["Idempotency-Key"], await request.json()))
        assert request.headers["Authorization"] == "Bearer pf_x"
        if len(requests) == 1:
            return web.json_response({"error": {"type": "quota_exceeded", "message": "later"}}, status=429)
        if len(requests) == 2:
            return web.Response(status=502, text="<html>a proxy</html>")
        if len(requests) == 3:
            return web.json_response({"id": "job-1", "status": "IN_PROGRESS"})
        return web.json_response({"id": "job-1", "status": "COMPLETED", "output": [1]})

    async with open_submitter(await serve(answer), "f", api_key="pf_x", run="r") as submitter:
        assert await submitter.answer(LINE) == b"[1]"
    assert requests == [("batch:r:7", {"input": {"a": 1}, "policy": {"priority": "batch"}})] * 4


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (413, {"error": {"type": "input_too_large", "message": "It is too large."}}),
        (
            200,
            {"id": "job-1", "status": "FAILED", "error": "x", "errorDetails": {"type": "e", "message": "x"}},
        ),
        (200, {"id": "job-1", "status": "CANCELLED"}),
    ],
)
async def test_the_error_of_one_line_names_it(serve, status: int, body: object) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    async with open_submitter(await serve(answer), "f", api_key="", run="r") as submitter:
        error = json.loads(await submitter.answer(LINE))["error"]
    assert error["type"]
    assert error["message"].startswith("in.jsonl, line 7: ")
    assert error["details"]["line"] == 7


async def test_an_error_of_all_lines_is_raised(serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"error": Forbidden("not yours").to_wire()}, status=403)

    async with open_submitter(await serve(answer), "f", api_key="", run="r") as submitter:
        with pytest.raises(Forbidden, match="not yours"):
            await submitter.answer(LINE)


async def test_a_gateway_that_stays_away_ends_it() -> None:
    async with open_submitter("http://127.0.0.1:9", "f", api_key="", run="r", patience_s=0.2) as submitter:
        with pytest.raises(GatewayError, match="continues where it stopped"):
            await submitter.answer(LINE)


async def test_bytes_and_half_surrogates_have_a_form(serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(
            {"id": "j", "status": "COMPLETED", "output": "AP8=", "output_type": "image/png"}
        )

    async with open_submitter(await serve(answer), "f", api_key="", run="r") as submitter:
        assert json.loads(await submitter.answer(LINE)) == {"content_type": "image/png", "base64": "AP8="}
    assert dumped("\ud800\n") == b'"\\ud800\\n"'

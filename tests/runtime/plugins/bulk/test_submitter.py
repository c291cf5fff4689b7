"""The submitter against a gateway that is busy, slow or unreachable.
With many lines, answers are written in order, and a slow line bounds how far the next lines run ahead.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pilotflame.errors import Forbidden, GatewayError, Unauthorized, UnknownFunction
from pilotflame.runtime.plugins.bulk.inputs import InputLine
from pilotflame.runtime.plugins.bulk.journal import Journal
from pilotflame.runtime.plugins.bulk.submitter import AHEAD, Submitter, dumped, run_in_order

Answer = Callable[[web.Request], Awaitable[web.Response]]
LINE = InputLine(7, "in.jsonl, line 7", b'{"a": 1}', 9)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Answer], Awaitable[str]]]:
    servers: list[TestServer] = []

    async def served(answer: Answer) -> str:
        app = web.Application()
        app.router.add_post("/v1/functions/{function}/jobs", answer)
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

    async with Submitter(await serve(answer), "f", api_key="pf_x", run="r") as submitter:
        assert await submitter.answer(LINE) == b"[1]"
    assert requests == [("batch:r:7", {"input": {"a": 1}, "priority": "batch"})] * 4


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (413, {"error": {"type": "input_too_large", "message": "It is too large."}}),
        (
            200,
            {"id": "job-1", "status": "FAILED", "error": {"type": "e", "message": "x"}},
        ),
        (200, {"id": "job-1", "status": "CANCELLED"}),
    ],
)
async def test_the_error_of_one_line_names_it(serve, status: int, body: object) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    async with Submitter(await serve(answer), "f", api_key="", run="r") as submitter:
        error = json.loads(await submitter.answer(LINE))["error"]
    assert error["type"]
    assert error["message"].startswith("in.jsonl, line 7: ")
    assert error["details"]["input_line"] == 7


async def test_an_error_of_all_lines_is_raised(serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"error": Forbidden("not yours").to_wire()}, status=403)

    async with Submitter(await serve(answer), "f", api_key="", run="r") as submitter:
        with pytest.raises(Forbidden, match="not yours"):
            await submitter.answer(LINE)


async def test_a_redirect_ends_it_and_a_proxy_does_not_get_requests_to_this_machine(
    serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "http://login.invalid/"})

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with Submitter(await serve(answer), "f", api_key="pf_x", run="r", patience_s=0.2) as submitter:
        with pytest.raises(GatewayError, match=r"302.*'http://login.invalid/'"):
            await submitter.answer(LINE)
    with pytest.raises(Unauthorized, match="user or a password"):
        Submitter("http://me:secret@127.0.0.1:9", "f", api_key="pf_x", run="r")


async def test_a_gateway_that_stays_away_ends_it() -> None:
    async with Submitter("http://127.0.0.1:9", "f", api_key="", run="r", patience_s=0.2) as submitter:
        with pytest.raises(GatewayError, match="continues where it stopped"):
            await submitter.answer(LINE)


async def test_bytes_and_half_surrogates_have_a_form(serve) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(
            {"id": "j", "status": "COMPLETED", "output": "AP8=", "output_type": "image/png"}
        )

    async with Submitter(await serve(answer), "f", api_key="", run="r") as submitter:
        assert json.loads(await submitter.answer(LINE)) == {"content_type": "image/png", "base64": "AP8="}
    assert dumped("\ud800\n") == b'"\\ud800\\n"'


# -- many lines


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    found = Journal(tmp_path / "out.jsonl", function="f", digest="d", restart=False)
    yield found
    found.close()


def numbered(count: int) -> list[InputLine]:
    return [InputLine(number, f"line {number}", b"%d" % number, number) for number in range(1, count + 1)]


async def test_answers_are_in_order_and_few_are_in_flight(journal: Journal) -> None:
    chance, flying, most = random.Random(3), 0, 0

    async def ask(line: InputLine) -> bytes:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        for _ in range(chance.randrange(80)):
            await asyncio.sleep(0)
        flying -= 1
        return line.text

    written: list[int] = []
    await run_in_order(
        iter(numbered(1000)), ask, journal, max_in_flight=16, written=lambda line: written.append(line.number)
    )
    assert journal.path.read_bytes().split() == [b"%d" % number for number in range(1, 1001)]
    assert most == 16
    assert written == sorted(written)
    assert written[-1] == 1000


async def test_one_slow_line_does_not_let_the_others_run_away(journal: Journal) -> None:
    go, full, farthest = asyncio.Event(), asyncio.Event(), 0

    async def ask(line: InputLine) -> bytes:
        nonlocal farthest
        if line.number == 1:
            await go.wait()
        elif not go.is_set():
            farthest = max(farthest, line.number)
            if line.number == 4 * AHEAD:
                full.set()
        return line.text

    running = run_in_order(iter(numbered(500)), ask, journal, max_in_flight=4, written=lambda _: None)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        tasks.create_task(running)
        await full.wait()
        # Let every task run that can run.
        for _ in range(100):
            await asyncio.sleep(0)
        assert farthest == 4 * AHEAD
        go.set()
    assert journal.done == 500


async def test_an_error_of_all_lines_stops_it_and_answers_are_kept(journal: Journal) -> None:
    async def ask(line: InputLine) -> bytes:
        if line.number == 41:
            raise UnknownFunction.named("f")
        return line.text

    with pytest.raises(UnknownFunction):
        await run_in_order(iter(numbered(5000)), ask, journal, max_in_flight=1, written=lambda _: None)
    assert journal.done == 40


async def test_a_source_that_breaks_off_stops_it(journal: Journal) -> None:
    def breaking():
        yield from numbered(600)
        raise GatewayError("gone")

    async def ask(line: InputLine) -> bytes:
        return line.text

    with pytest.raises(GatewayError):
        await run_in_order(breaking(), ask, journal, max_in_flight=8, written=lambda _: None)
    assert journal.done <= 600

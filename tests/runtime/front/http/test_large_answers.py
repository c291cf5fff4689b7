"""Large answers arrive whole, on both paths. A caller that reads nothing is disconnected, and holds up no other caller."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from live import Function, Gateway, gateway_here, until
from pilotflame.runtime.front.http.large_answers import LargeAnswers
from pilotflame.runtime.front.http.responses import zstd

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZE = 3 << 20
SOURCE = "def handler(event):\n    return bytes(range(256)) * (event // 256)\n"
WHOLE = bytes(range(256)) * (SIZE // 256)
# aiohttp reads a request with the second headers. Without them, it is a plain call.
BOTH_PATHS = pytest.mark.parametrize(
    "headers", [{}, {"Prefer": "handling=lenient"}], ids=["plain", "aiohttp"]
)


@pytest_asyncio.fixture(loop_scope="module")
async def impatient(state: Path):
    async with gateway_here(state) as gateway:
        room_of(gateway).timeout_s = 0.3
        yield gateway


def room_of(gateway: Gateway) -> LargeAnswers:
    assert gateway.server is not None
    return gateway.server.http.chain.answers


async def deployed(gateway: Gateway) -> Function:
    function = await gateway.deploy(SOURCE, name="f")
    # Start a worker, so that the later calls find a warm worker.
    assert (await call(gateway, 256)).content == bytes(range(256))
    return function


async def call(gateway: Gateway, size: int, **headers: str) -> httpx.Response:
    return await gateway.client.post("/invoke/f", json=size, headers=headers)


def wire(size: int, headers: dict[str, str]) -> bytes:
    """Return the bytes of a call whose answer has this size."""
    body = str(size)
    lines = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": len(body), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /invoke/f HTTP/1.1\r\n{head}\r\n{body}".encode()


@BOTH_PATHS
async def test_a_large_answer_arrives_whole_and_the_connection_goes_on(
    gateway: Gateway, headers: dict[str, str]
) -> None:
    await deployed(gateway)
    for size in (SIZE, 256, SIZE):
        assert (await call(gateway, size, **headers)).content == WHOLE[:size]
    assert not room_of(gateway).room._total


@pytest.mark.parametrize("coding", ["", "gzip", "zstd"])
async def test_a_job_with_a_large_result_is_whole_json(gateway: Gateway, coding: str) -> None:
    await gateway.deploy("def handler(event):\n    return ['x' * event, 1]\n", name="f")
    response = await gateway.client.post(
        "/v2/f/runsync", json={"input": SIZE}, headers={"Accept-Encoding": coding}
    )
    assert response.headers.get("Content-Encoding", "") == coding
    # httpx decodes gzip only.
    body = json.loads(zstd.decompress(response.content) if coding == "zstd" else response.content)
    assert (body["output"], body["status"]) == (["x" * SIZE, 1], "COMPLETED")
    assert (await gateway.client.get(f"/v2/f/status/{body['id']}")).json()["output"] == body["output"]
    head = await gateway.client.head(f"/v2/f/status/{body['id']}")
    assert (head.status_code, head.content) == (200, b"")


@BOTH_PATHS
async def test_requests_that_follow_at_once_get_their_answers(
    gateway: Gateway, headers: dict[str, str]
) -> None:
    await deployed(gateway)
    reader, writer = await asyncio.open_connection(*gateway.address)
    for size in (SIZE, 256, SIZE):
        writer.write(wire(size, headers))
    for size in (SIZE, 256, SIZE):
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(size) == WHOLE[:size]
    writer.close()


@BOTH_PATHS
async def test_a_caller_that_reads_nothing_is_disconnected(
    impatient: Gateway, headers: dict[str, str]
) -> None:
    gateway = impatient
    await deployed(gateway)
    size = 64 << 20
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(wire(size, headers))
    answers = room_of(gateway)

    async def held() -> bool:
        return answers.room._total == size

    async def free() -> bool:
        return not answers.room._total

    writer.transport.pause_reading()
    await until(held, "the answer is being sent")
    await until(free, "the caller is disconnected")
    writer.transport.resume_reading()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(size)
    writer.transport.abort()
    assert (await call(gateway, SIZE)).content == WHOLE


@BOTH_PATHS
async def test_answers_that_nobody_reads_leave_room_for_other_callers(
    impatient: Gateway, headers: dict[str, str]
) -> None:
    gateway = impatient
    await deployed(gateway)
    async with gateway.at_home() as home:
        keys = [(await home.post("/v1/keys", json={"name": name})).json() for name in ("a", "b")]
    room = room_of(gateway).room
    room._most = 2 * SIZE
    room.add(keys[0]["id"], SIZE * 17 // 10)
    size = SIZE // 4
    a, b = [await call(gateway, size, Authorization=f"Bearer {key['key']}", **headers) for key in keys]
    # The call has run, so a client must not repeat it.
    assert (a.status_code, a.json()["error"]["type"]) == (500, "call_ended")
    assert (a.headers["x-should-retry"], "Retry-After" in a.headers) == ("false", False)
    assert b.content == WHOLE[:size]
    # AWS's clients repeat a call after any error except an error of the function. So the answer must be such an error.
    path, authorized = "/lambda/2015-03-31/functions/f/invocations", f"Bearer {keys[0]['key']}"
    answer = await gateway.client.post(path, json=size, headers={"Authorization": authorized})
    assert (answer.status_code, answer.headers["X-Amz-Function-Error"]) == (200, "Unhandled")


async def test_a_result_without_room_may_be_fetched_again(impatient: Gateway) -> None:
    gateway = impatient
    await gateway.deploy(SOURCE.replace("bytes(range(256))", "'x' * 256"), name="f")
    job = (await gateway.client.post("/v1/functions/f/jobs?wait_s=60", json={"input": SIZE})).json()
    room_of(gateway).room._most = SIZE
    plain = {"Accept-Encoding": "identity"}
    answer = await gateway.client.get(f"/v1/functions/f/jobs/{job['id']}", headers=plain)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded")
    assert answer.headers["Retry-After"]


async def test_a_piece_without_room_ends_the_stream(impatient: Gateway) -> None:
    """The status was sent with the first piece, so the gateway can only end the response."""
    gateway = impatient
    await gateway.deploy("def handler(event):\n    yield 'a'\n    yield 'x' * event\n", name="f")
    room_of(gateway).room._most = SIZE // 2
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(wire(SIZE, {}))
    seen = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 16):
                seen += part
    assert seen.startswith(b"HTTP/1.1 200")
    # There is no second response behind the first pieces.
    assert seen.count(b"HTTP/1.1") == 1
    assert len(seen) < SIZE
    writer.close()


@pytest.mark.parametrize("source", [SOURCE, SOURCE.replace("return", "yield")], ids=["output", "piece"])
async def test_a_reader_of_events_that_reads_nothing_is_disconnected(impatient: Gateway, source: str) -> None:
    gateway, size = impatient, 32 << 20
    await gateway.deploy(source.replace("bytes(range(256))", "'x' * 256"), name="f")
    job = (await gateway.client.post("/v1/functions/f/jobs?wait_s=60", json={"input": size})).json()
    assert job["status"] == "COMPLETED"
    answers, (reader, writer) = room_of(gateway), await asyncio.open_connection(*gateway.address)
    writer.transport.pause_reading()
    writer.write(f"GET /v1/functions/f/jobs/{job['id']}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    async def held() -> bool:
        return answers.room._total > size

    async def free() -> bool:
        return not answers.room._total

    await until(held, "the event is being sent")
    await until(free, "the reader is disconnected")
    writer.transport.resume_reading()
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await reader.readexactly(size)
    writer.transport.abort()

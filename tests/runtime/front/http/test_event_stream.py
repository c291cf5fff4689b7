"""Event streams, over real sockets: readers that do not read, workers that die in the middle, pieces of any size."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from live import LIMIT_S, Gate, Gateway, events, until
from pilotflame.runtime.front.api import invoke as gateway_module

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIECE_BYTES = 16 << 10
# An upper bound for the bytes of a stream without a reader: the stream's credit, the gateway's buffers, and the kernel's buffers
# of the connection.
MOST_BYTES = 24 << 20

KINDS = pytest.mark.parametrize("kind", ["", "async "], ids=["generator", "async-generator"])


def source(kind: str) -> str:
    """Return a handler. The event `endless` starts an endless stream. `count` yields how many pieces endless streams have made. A
    number yields this many pieces.
    """
    return f"""
import gate
made = 0
{kind}def handler(event):
    global made
    if event == "count":
        yield made
    elif event == "endless":
        try:
            while True:
                made += 1
                yield "x" * {PIECE_BYTES}
        finally:
            gate.say("closed")
    else:
        for number in range(event):
            yield number
"""


PRINTS = "def handler(event):\n    for number in range(event):\n        yield number\n"


@asynccontextmanager
async def not_reading(gateway: Gateway, path: str, *headers: str) -> AsyncIterator[socket.socket]:
    """Call the handler with `endless` on a socket with a small buffer, and read nothing."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, gateway.address)
        head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Length: 9", *headers]
        await asyncio.get_running_loop().sock_sendall(sock, "\r\n".join([*head, "", '"endless"']).encode())
        yield sock


@KINDS
async def test_a_slow_reader_holds_back_its_own_handler_only(deploy, gateway: Gateway, gate: Gate, kind: str):
    function = await deploy(source(kind), {"concurrency": 4, "scale.max": 1}, gate=gate)

    async def counted() -> int:
        return int(events((await function.call("count")).text)[0][2])

    async def stands() -> bool:
        """Return True if the endless stream makes no piece while another stream of the same worker runs to its end."""
        before = await counted()
        assert len(events((await function.call(500)).text)) == 501
        return 0 < before == await counted()

    async with not_reading(gateway, function.path):
        await until(stands, "a handler that is held back")
        assert await counted() * PIECE_BYTES < MOST_BYTES
    await gate.next("closed")


@KINDS
async def test_a_reader_that_never_reads_is_disconnected(
    deploy, gateway: Gateway, gate: Gate, monkeypatch, kind: str
):
    monkeypatch.setattr(gateway_module, "LAST_EVENT_S", 0.5)
    function = await deploy(source(kind), gate=gate)
    async with not_reading(gateway, function.path, "X-Request-Timeout: 0.3") as sock:
        await gate.next("closed")
        poll = select.poll()
        # Request no events, because `poll` reports errors and hang-ups in any case.
        poll.register(sock, 0)
        assert await asyncio.to_thread(poll.poll, LIMIT_S * 1000)

    async def is_counted() -> bool:
        ended = f'pilotflame_invocations_total{{code="504",function="{function.name}",source="http"}} 1.0'
        return ended in (await gateway.client.get("/metrics")).text

    # The call is counted when the worker reports its end. This may be after the disconnection.
    await until(is_counted, "the end of the invocation by its deadline")


async def test_a_reader_that_leaves_is_no_error_of_the_gateway(deploy, caplog):
    function = await deploy(PRINTS, {"scale.max": 1})

    async def leave(number: int) -> None:
        with contextlib.suppress(httpx.HTTPError):
            async with function.client.stream("POST", function.path, json=500) as response:
                async for _ in response.aiter_raw():
                    number -= 1
                    if number < 0:
                        return

    for number in range(30):
        await asyncio.gather(*(leave(number % 5) for _ in range(5)))
    await function.settled(ready=1, in_flight=0, queued=0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@KINDS
async def test_the_deadline_ends_a_stream_with_its_error(deploy, gate: Gate, kind: str):
    wait = "await gate.wait_async()" if kind else "gate.wait()"
    function = await deploy(f"import gate\n{kind}def handler(event):\n    yield 1\n    {wait}\n", gate=gate)
    found = events((await function.call(None, X_Request_Timeout="0.3")).text)
    assert [(name, number) for number, name, _ in found] == [("output", "1"), ("error", "2")]
    assert found[1][2]["type"] == "deadline_exceeded"
    gate.open()


@KINDS
async def test_a_worker_that_dies_in_the_middle_ends_it_with_an_error(deploy, kind: str):
    function = await deploy(
        f"import os\n{kind}def handler(event):\n    yield 1\n    yield 2\n    os._exit(3)\n"
    )
    found = events((await function.call()).text)
    assert [name for _, name, _ in found] == ["output", "output", "error"]
    assert found[2][2]["type"] == "worker_died"


@KINDS
async def test_a_handler_that_raises_in_the_middle_ends_it_with_an_error(deploy, kind: str):
    function = await deploy(f"{kind}def handler(event):\n    yield 1\n    raise ValueError('no more')\n")
    found = events((await function.call()).text)
    assert [name for _, name, _ in found] == ["output", "error"]
    assert found[1][2]["type"] == "handler_failed"


@KINDS
async def test_pieces_larger_than_the_credit_pass_one_by_one(deploy, kind: str):
    function = await deploy(
        f"{kind}def handler(event):\n    for n in range(event):\n        yield [n, 'x' * 300_000]\n"
    )
    found = events((await function.call(5)).text)
    assert [data[0] for _, name, data in found if name == "output"] == [0, 1, 2, 3, 4]
    assert found[-1][1] == "completed"


async def test_pieces_sent_together_are_numbered_without_gaps(deploy):
    function = await deploy("def handler(event):\n    yield from range(event)\n")
    found = events((await function.call(5000)).text)
    assert [int(number) for number, _, _ in found] == list(range(1, 5002))
    assert [data for _, name, data in found if name == "output"] == list(range(5000))
    assert json.dumps(found[-1][2]) == "{}"

"""The lane: no caller can tell whether his request went through it, whatever happens on its connection meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import pytest
from live import LIMIT_S, Function, Gate, Gateway
from pilotflame.errors import OutputInvalid
from pilotflame.runtime.api.fast_path import FastPath
from pilotflame.runtime.api.responses import Response

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
# Keeps a request out of the lane, and changes nothing else.
ORDINARY = "Prefer: nothing"
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request that the lane was asked to take, whether it did."""
    asked: list[bool] = []
    take = FastPath.take

    def watched(*given: object) -> object:
        passage = take(*given)  # type: ignore[arg-type]
        asked.append(passage is not None)
        return passage

    monkeypatch.setattr(FastPath, "take", watched)
    return asked


@contextlib.asynccontextmanager
async def wire(gateway: Gateway) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(*gateway.address)
    try:
        yield reader, writer
    finally:
        writer.close()


def post(function: Function, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {function.path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def reply(connection: Wire) -> tuple[str, bytes]:
    """The next answer, its head as it came."""
    async with asyncio.timeout(LIMIT_S):
        head = (await connection[0].readuntil(b"\r\n\r\n")).decode()
        found = re.search(r"Content-Length: (\d+)", head)
        assert found is not None, head
        return head, await connection[0].readexactly(int(found[1]))


def timeless(head: str) -> str:
    return re.sub(r"(dur=|Date: )[^\r,]*", r"\1", head)


@pytest.mark.parametrize(
    "source",
    [ECHO, "def handler(event):\n    raise ValueError(event)", "def handler(event):\n    return 'x' * 5000"],
    ids=["answer", "error", "larger"],
)
@pytest.mark.parametrize("headers", [[], ["Accept-Encoding: gzip"], ["X-Priority: 9"]], ids=str)
async def test_an_answer_is_the_same_both_ways(
    gateway: Gateway, deploy, taken: list[bool], source: str, headers: list[str]
):
    function = await deploy(source)
    await function.call(1)  # no cold start in either
    told = [*headers, "X-Request-Id: mine"]
    taken.clear()
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"1", *told))
        through_lane = await reply(connection)
        connection[1].write(post(function, b"1", *told, ORDINARY))
        ordinary = await reply(connection)
    assert taken == [True, False]
    assert timeless(through_lane[0]) == timeless(ordinary[0])
    assert through_lane[1] == ordinary[1]


async def test_requests_behind_one_in_the_lane_are_answered_in_order(
    gateway: Gateway, deploy, gate: Gate, taken: list[bool]
):
    function = await deploy(
        "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event", gate=gate
    )
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"1"))
        first = await gate.next("1")
        connection[1].write(post(function, b"2") + post(function, b"3"))
        connection[1].write(post(function, b"4")[:20])
        first.go()
        assert (await reply(connection))[1] == b"1"
        gate.open()
        assert [(await reply(connection))[1] for _ in range(2)] == [b"2", b"3"]
        connection[1].write(post(function, b"4")[20:])
        assert (await reply(connection))[1] == b"4"
    assert taken[0] is True


async def test_a_caller_in_the_lane_who_leaves_is_noticed(
    gateway: Gateway, deploy, gate: Gate, taken: list[bool]
):
    source = """
import gate, time
def handler(event, context):
    gate.say("runs")
    while not context.cancelled:
        time.sleep(0.001)
    gate.say("stopped")
"""
    function = await deploy(source, gate=gate)
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"1"))
        await gate.next("runs")
    await gate.next("stopped")
    await function.settled(ready=1, in_flight=0)
    assert taken[0] is True


async def test_what_would_be_more_than_one_header_is_not_sent():
    sent: list[bytes] = []
    lane = FastPath(None, None, None)  # type: ignore[arg-type]
    lane.leave(sent.append, Response(200, {"X-Request-Id": "mine", "Content-Type": "a/b\r\nX-Evil: 1"}, b""))
    await asyncio.sleep(0)
    assert OutputInvalid.code.encode() in sent[0]
    assert b"X-Evil" not in sent[0]

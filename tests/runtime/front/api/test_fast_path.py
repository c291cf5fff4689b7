"""The fast path: a caller cannot tell whether their request took it. Without the fast path, the gateway answers as well."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from live import LIMIT_S, Function, Gate, Gateway, gateway_here
from pilotflame.errors import OutputInvalid
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.front.api.fast_path import FastPath
from pilotflame.runtime.front.api.invoke import Gateway as ApiGateway
from pilotflame.runtime.front.http import connection as connections
from pilotflame.runtime.front.http.connection import encode
from pilotflame.runtime.front.http.large_answers import LargeAnswers
from pilotflame.runtime.front.http.responses import Response
from pilotflame.runtime.ground.access.keys import Caller

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
# Keeps a request off the fast path, and changes nothing else.
ORDINARY = "Prefer: nothing"
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each request that was offered to the fast path: whether the fast path took the request."""
    asked: list[bool] = []
    take = FastPath.take

    def watched(*given: object) -> object:
        request = take(*given)  # type: ignore[arg-type]
        asked.append(request is not None)
        return request

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
    return re.sub(r"(dur=)[^\r,]*|(Date: )[^\r]*", r"\1\2", head)


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
        fast = await reply(connection)
        connection[1].write(post(function, b"1", *told, ORDINARY))
        ordinary = await reply(connection)
    assert taken == [True, False]
    assert timeless(fast[0]) == timeless(ordinary[0])
    assert fast[1] == ordinary[1]


async def test_requests_behind_one_on_the_fast_path_are_answered_in_order(
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


async def test_a_fast_request_whose_caller_leaves_is_cancelled(
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


async def test_a_content_type_with_a_line_break_is_not_sent():
    sent = encode(Response(200, {"X-Request-Id": "mine", "Content-Type": "a/b\r\nX-Evil: 1"}, b""))
    assert OutputInvalid.code.encode() in b"".join(sent)
    assert b"X-Evil" not in b"".join(sent)


async def test_without_aiohttps_internals_the_ordinary_way_serves_and_says_so(
    state, taken: list[bool], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(connections, "INTERNALS", (*connections.INTERNALS, "_gone_in_the_next_release"))
    timers: list[object] = []
    arrived = connections.ClientConnection.header_arrived

    def watched(connection: connections.ClientConnection) -> None:
        arrived(connection)
        timers.append(connection._header_timer)

    monkeypatch.setattr(connections.ClientConnection, "header_arrived", watched)
    async with gateway_here(state, header_timeout_s=0.2) as gateway:
        assert "lacks _gone_in_the_next_release" in capfd.readouterr().err
        function = await gateway.deploy(ECHO)
        async with wire(gateway) as connection:
            for number in range(3):
                connection[1].write(post(function, str(number).encode()))
                assert (await reply(connection))[1] == str(number).encode()
            # The limit is for headers that do not arrive: after the first one no timer is left.
            assert timers
            assert set(timers) == {None}
            connection[1].write(b"NO HTTP\r\n\r\n")
            head, body = await reply(connection)
        assert (head.split()[1], b"Malformed HTTP request" in body) == ("400", True)
        async with wire(gateway) as (reader, writer):
            writer.write(b"POST /inv")
            async with asyncio.timeout(LIMIT_S):
                assert await reader.read() == b""
    assert taken == []


@pytest.mark.parametrize(
    "header", ["Origin: http://localhost", "ce-type: t", "Content-Type: Application/CloudEvents+json"]
)
async def test_requests_of_web_pages_and_events_do_not_take_it(deploy, gateway: Gateway, taken: list[bool], header: str):  # fmt: skip
    function = await deploy(ECHO)
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"{}", header))
        await reply(connection)
    assert taken == [False]


@pytest.mark.parametrize("header", ["X: fast", ORDINARY, "Accept: text/event-stream"])
async def test_callers_that_disconnect_leave_no_timers_in_the_http_layer(deploy, gate: Gate, gateway: Gateway, header: str):  # fmt: skip
    streams = header.startswith("Accept")
    source = "import gate\nasync def handler(event):\n    await gate.wait_async('runs')\n    {}"
    function = await deploy(source.format("yield 1" if streams else "return 1"), {"concurrency": 64, "scale.max": 1}, gate=gate)  # fmt: skip
    gc.collect()
    before = len(http_timers())
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(30):
            connection = await stack.enter_async_context(wire(gateway))
            connection[1].write(post(function, b"{}", header))
        for _ in range(30):
            await gate.next("runs")
        # A stream has a timer for its deadline.
        assert len(http_timers()) >= before + (30 if streams else 0)
    await function.settled(ready=1, in_flight=0)
    gc.collect()
    assert len(http_timers()) <= before


def http_timers() -> list[str]:
    """Return the pending timers that will call the HTTP layer or end a wait. uvloop itself lists no timers."""
    timers: list[Any] = [found for found in gc.get_objects() if type(found).__name__ == "TimerHandle"]
    shown = [repr(timer) for timer in timers if not timer.cancelled()]
    return [
        text
        for text in shown
        if re.search(r"Connection|RequestHandler|Timeout\._on_timeout|runtime\.api", text)
    ]


async def test_an_answer_that_cannot_be_made_drops_no_other(
    deploy, gateway: Gateway, gate: Gate, taken: list[bool], monkeypatch: pytest.MonkeyPatch
):
    source = "import gate\nasync def handler(event):\n    await gate.wait_async(str(event))\n    return event"
    function = await deploy(source, {"concurrency": 4, "scale.max": 1}, gate=gate)
    answered = ApiGateway.answered

    def broken(self: ApiGateway, name: str, invocation: Invocation, caller: Caller) -> Response:
        if invocation.body == b"0":
            raise UnicodeEncodeError("ascii", "é", 0, 1, "no header can hold this")
        return answered(self, name, invocation, caller)

    monkeypatch.setattr(ApiGateway, "answered", broken)
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wire(gateway)) for _ in range(4)]
        for number, (_, writer) in enumerate(wires):
            writer.write(post(function, str(number).encode()))
            await gate.next()
        gate.open()
        heads = [(await reply(one))[0] for one in wires]
    assert taken == [True] * 4
    assert [head.split()[1] for head in heads] == ["500", "200", "200", "200"]
    assert (await function.status())["activations"] == 1


async def test_a_response_that_cannot_be_sent_drops_no_other_of_its_turn(caplog: pytest.LogCaptureFixture):
    path, sent, done = FastPath(None, None, None, [], LargeAnswers(1.0)), list[int](), asyncio.Event()  # type: ignore[arg-type]

    def fail(_response: Response) -> None:
        raise KeyError("transport")

    path.send(fail, Response(200, {}, b""))
    path.send(lambda response: sent.append(response.status), Response(201, {}, b""))
    path.send(lambda _response: done.set(), Response(202, {}, b""))
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert sent == [201]
    assert "a response with status 200 could not be sent" in caplog.text

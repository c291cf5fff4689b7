"""Plain calls: a caller cannot tell whether aiohttp has read their request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http import HttpRequestParser
from example_count import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from live import LIMIT_S, Function, Gate, Gateway
from pilotflame.errors import OutputInvalid
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.front.api.invoke import Invoker
from pilotflame.runtime.front.api.plain_calls import PlainCalls
from pilotflame.runtime.front.http import connection as connection_module
from pilotflame.runtime.front.http import transport as transport_module
from pilotflame.runtime.front.http.responses import Response
from pilotflame.runtime.front.http.transport import (
    MAX_BEHIND_BYTES,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    PlainConnection,
    encode,
    read_head,
)
from pilotflame.runtime.ground.access.keys import Caller

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
# A header with which aiohttp reads the request. It has no other effect.
ORDINARY = "Prefer: nothing"
Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list. For each call that arrives on an idle connection, it records whether the call was read as a plain call."""
    asked: list[bool] = []
    read = PlainConnection._read

    def watched(connection: PlainConnection, data: bytes) -> bool:
        found = read(connection, data)
        if data.startswith(b"POST /invoke/"):
            asked.append(found)
        return found

    monkeypatch.setattr(PlainConnection, "_read", watched)
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
    """Return the unparsed head and the body of the next answer."""
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
    # Start a worker, so that neither answer has a cold start.
    await function.call(1)
    told = [*headers, "X-Request-Id: mine"]
    taken.clear()
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"1", *told))
        plain = await reply(connection)
        connection[1].write(post(function, b"1", *told, ORDINARY))
        ordinary = await reply(connection)
    assert taken == [True, False]
    assert timeless(plain[0]) == timeless(ordinary[0])
    assert plain[1] == ordinary[1]


async def test_requests_behind_a_plain_call_are_answered_in_order(
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


async def test_a_plain_call_whose_caller_leaves_is_cancelled(
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


@pytest.mark.parametrize(
    "header", ["Origin: http://localhost", "ce-type: t", "Content-Type: Application/CloudEvents+json"]
)
async def test_requests_of_web_pages_and_events_are_not_plain(deploy, gateway: Gateway, taken: list[bool], header: str):  # fmt: skip
    function = await deploy(ECHO)
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"{}", header))
        await reply(connection)
    assert taken == [False]


@pytest.mark.parametrize("header", ["X: plain", ORDINARY, "Accept: text/event-stream"])
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
    answered = Invoker.answered

    def broken(self: Invoker, name: str, invocation: Invocation, caller: Caller) -> Response:
        if invocation.body == b"0":
            raise UnicodeEncodeError("ascii", "é", 0, 1, "no header can hold this")
        return answered(self, name, invocation, caller)

    monkeypatch.setattr(Invoker, "answered", broken)
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
    calls, sent, done = object.__new__(PlainCalls), list[int](), asyncio.Event()
    calls._outgoing = []

    def fail(_response: Response, _sliced: object) -> None:
        raise KeyError("transport")

    calls.send(fail, Response(200, {}, b""))
    calls.send(lambda response, _sliced: sent.append(response.status), Response(201, {}, b""))
    calls.send(lambda _response, _sliced: done.set(), Response(202, {}, b""))
    async with asyncio.timeout(LIMIT_S):
        await done.wait()
    assert sent == [201]
    assert "a response with status 200 could not be sent" in caplog.text


# -- which bytes are a plain call

HEADS = st.lists(
    st.tuples(
        st.sampled_from(
            ["Host", "Content-Length", "content-length", "Content-Type", "X-Request-Id", "Connection", "Transfer-Encoding", "Expect", "Prefer",
             "Origin", "Accept", "Bad Name", "", "X\tY", "é"],
        ),
        st.sampled_from([": ", ":", ":\t", " : ", ":\r\n ", ""]),
        st.sampled_from(["localhost", "0", "3", " 3 ", "+3", "3, 3", "keep-alive", "close", "chunked", "a\rb", "a\nb", "a\x00b", "é", "", "~"]),
        st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r"]),
    ), max_size=5,
)  # fmt: skip
FIRST = ["POST /invoke/f HTTP/1.1\r\n"] * 6 + [
    "POST /invoke/f HTTP/1.0\r\n", "GET /invoke/f HTTP/1.1\r\n", "POST  /invoke/f HTTP/1.1\r\n", "\r\nPOST /invoke/f HTTP/1.1\r\n",
    "POST /invoke/f HTTP/1.1\n", "POST /invoke/é HTTP/1.1\r\n", "POST http://h/invoke/f HTTP/1.1\r\n",
]  # fmt: skip


class Unpaused:
    """Stands in for the protocol of a parser. The parser never pauses it, because the bodies are small."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


@settings(max_examples=examples(500), deadline=None)
@given(st.sampled_from(FIRST), HEADS)
async def test_a_plain_head_is_one_that_aiohttp_reads_in_the_same_way(
    first: str, fields: list[tuple[str, ...]]
):
    sent = (first + "".join(map("".join, fields)) + "\r\n").encode()
    head = read_head(sent + b"abc")
    if head is None:
        return
    parser = HttpRequestParser(
        Unpaused(), asyncio.get_running_loop(), 2**16, max_line_size=8190, max_field_size=8190  # type: ignore[arg-type]
    )  # fmt: skip
    messages, upgraded, _ = parser.feed_data(sent + b"abc"[: head.length])
    message, payload = messages[0]
    assert head.sent == sent
    # Compare the names in lower case, because aiohttp changes the case of names that it knows.
    found, expected = (
        [(name.lower(), value) for name, value in of.items()] for of in (head.headers, message.headers)
    )
    assert (head.path, found) == (message.path, expected)
    assert not any((upgraded, message.should_close, message.chunked, message.compression))
    assert (message.method, int(message.headers.get("Content-Length", "0"))) == ("POST", head.length)
    assert payload.is_eof() == (head.length <= 3)


@pytest.mark.parametrize(
    ("sent", "plain"),
    [
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nConnection: Keep-Alive\r\n\r\n", True),
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n", False),
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n", False),
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", False),
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", False),
        (b"POST /invoke/f HTTP/1.1\r\n\r\n", False),
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\n" + b"X: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", False),
        (b"POST /invoke/f HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: x\r\n" % n for n in range(MAX_HEADERS + 1)) + b"\r\n", False),
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_plain(sent: bytes, plain: bool):
    assert (read_head(sent) is not None) is plain


@pytest.mark.parametrize(
    ("between", "again"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", True),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2, False),
        (b"POST /invoke/none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"POST /invoke/none HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", False),
    ],
    ids=["get", "two", "body", "chunks"],
)  # fmt: skip
async def test_after_other_requests_a_connection_reads_calls_again_where_their_end_is_known(
    deploy, gateway: Gateway, taken: list[bool], between: bytes, again: bool
):
    function = await deploy(ECHO)
    async with wire(gateway) as connection:
        connection[1].write(between)
        for _ in range(between.count(b"HTTP/1.1")):
            await reply(connection)
        taken.clear()
        for number in range(2):
            connection[1].write(post(function, b"%d" % number))
            assert (await reply(connection))[1] == b"%d" % number
    assert taken == ([True, True] if again else [])


async def test_what_arrives_behind_a_call_is_limited(deploy, gateway: Gateway, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
    function = await deploy(source, gate=gate)
    async with wire(gateway) as connection:
        connection[1].write(post(function, b"1"))
        await gate.next()
        assert gateway.server is not None
        runner = gateway.server.http._runner.server
        assert runner is not None
        (served,) = [one for one in runner.connections if one._pending is not None]  # type: ignore[attr-defined]
        connection[1].write(post(function, b"2") * 100_000)
        async with asyncio.timeout(LIMIT_S):
            while served.transport is not None and served.transport.is_reading():
                await asyncio.sleep(0.01)
        assert len(served._behind) <= MAX_BEHIND_BYTES + (256 << 10)  # type: ignore[attr-defined]
        gate.open()
        for number in [1, 2, 2]:
            assert (await reply(connection))[1] == b"%d" % number


async def test_no_private_name_of_aiohttp_is_used():
    """Another release of aiohttp may change these names, and the connection would break in ways that no test sees."""
    theirs = {
        name for kind in web.RequestHandler.__mro__[:-1] for name in (*vars(kind), *getattr(kind, "__slots__", ()))
    }  # fmt: skip
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")}
    for module in (connection_module, transport_module):
        source = Path(module.__file__ or "").read_text()
        assert not private & set(re.findall(r"\b_[a-z_]+\b", source)), module.__name__

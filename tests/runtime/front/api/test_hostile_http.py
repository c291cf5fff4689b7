"""Hostile HTTP over bare sockets: the status that refuses it, the service for other clients meanwhile, and its cost."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator

import brotli
import psutil
import pytest
from backports import zstd
from live import LIMIT_S, Function, Gate, Gateway, failure, gateway_here, gateway_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
TELLS = "def handler(event):\n    print('called', repr(event), flush=True)\n    return event"
MIB = 1 << 20
Reply = tuple[int, dict[str, str], bytes]


class Wire:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, *parts: bytes | str) -> None:
        for part in parts:
            # uvloop raises an error at a write to a connection that the gateway has reset.
            if not self.writer.is_closing():
                self.writer.write(part.encode("latin-1") if isinstance(part, str) else part)

    async def reply(self, *, head_only: bool = False) -> Reply:
        """Read the next response."""
        async with asyncio.timeout(LIMIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            named = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
            }
            length = 0 if head_only else int(named.get("content-length", "0"))
            return int(first.split()[1]), named, await self.reader.readexactly(length)

    async def ended(self) -> bytes:
        """Wait until the gateway closes the connection. Return the bytes that it sent before."""
        async with asyncio.timeout(LIMIT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


@contextlib.asynccontextmanager
async def wire(gateway: Gateway) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection(*gateway.address)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


async def status_of(gateway: Gateway, *parts: bytes | str) -> int:
    """Return the status of the only response to one request."""
    async with wire(gateway) as connection:
        connection.send(*parts)
        return (await connection.reply())[0]


def post(path: str, body: bytes | str, *headers: str) -> bytes:
    raw = body if isinstance(body, bytes) else body.encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(raw)}"]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + raw


def get(path: str, *headers: str, method: str = "GET") -> str:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""])


async def calls(function: Function) -> list[str]:
    """Call the handler once more, and return what all its calls have logged."""
    assert await function.answer("after") == "after"
    await function.logged("called 'after'")
    return [line["text"] for line in await function.lines() if line["text"].startswith("called")]


# -- malformed HTTP


MALFORMED = {
    "no-request-line": "hello\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n",
    "another-version": "GET /healthz HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "http-2-preface": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "blank-in-the-target": "GET /healthz /x HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "nul-in-the-target": "GET /health\0z HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no-colon": get("/healthz", "nothing"),
    "blank-before-the-colon": get("/healthz", "X-Name : 1"),
    "no-name": get("/healthz", ": 1"),
    "nul-in-a-value": get("/healthz", "X-Name: a\0b"),
    "bare-cr-in-a-value": get("/healthz", "X-Name: a\rb"),
    "folded": get("/healthz", "X-Name: a\r\n b"),
    "long-target": get("/" + "x" * 9000),
    "long-header": get("/healthz", "X-Name: " + "x" * 9000),
    "long-name": get("/healthz", "x" * 9000 + ": 1"),
    "many-headers": get("/healthz", *(f"X-{n}: 1" for n in range(200))),
    "negative-length": get("/healthz", "Content-Length: -1"),
    "length-of-words": get("/healthz", "Content-Length: ten"),
    "length-with-a-sign": get("/healthz", "Content-Length: +1"),
    "length-beyond-64-bits": get("/healthz", f"Content-Length: {'9' * 40}"),
    "chunk-beyond-64-bits": get("/healthz", "Transfer-Encoding: chunked") + "f" * 40 + "\r\n",
    "two-lengths": get("/healthz", "Content-Length: 1", "Content-Length: 2") + "ab",
    "the-same-length-twice": get("/healthz", "Content-Length: 1", "Content-Length: 1") + "a",
    "a-list-of-lengths": get("/healthz", "Content-Length: 1, 2") + "ab",
    "length-and-chunks": get("/healthz", "Content-Length: 5", "Transfer-Encoding: chunked") + "0\r\n\r\n",
    "chunks-and-length": get("/healthz", "Transfer-Encoding: chunked", "Content-Length: 5") + "0\r\n\r\n",
    "chunked-not-last": get("/healthz", "Transfer-Encoding: chunked, identity") + "0\r\n\r\n",
    "almost-chunked": get("/healthz", "Transfer-Encoding: xchunked") + "0\r\n\r\n",
    "chunked-twice": get("/healthz", "Transfer-Encoding: chunked", "Transfer-Encoding: chunked")
    + "0\r\n\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_a_malformed_request_is_refused(gateway: Gateway, name: str, caplog):
    """The gateway answers one typed 400 and closes the connection. It does not parse the following bytes as a request."""
    async with wire(gateway) as connection:
        connection.send(MALFORMED[name], get("/readyz"))
        status, headers, body = await connection.reply()
        assert (status, headers["content-type"].partition(";")[0]) == (400, "application/json"), body
        assert json.loads(body)["error"]["type"] == "malformed_request"
        assert await connection.ended() == b""
    assert caplog.text == ""


async def test_a_smuggled_request_is_not_served(gateway: Gateway, deploy):
    function = await deploy(TELLS)
    hidden = post(function.path, "1")
    async with wire(gateway) as connection:
        head = get(
            function.path, f"Content-Length: {len(hidden) + 5}", "Transfer-Encoding: chunked", method="POST"
        )
        connection.send(head, "0\r\n\r\n", hidden)
        assert (await connection.reply())[0] == 400
        assert await connection.ended() == b""
    assert await calls(function) == ["called 'after'"]


# -- unusual, and allowed


async def test_requests_in_one_packet_are_answered_in_order(gateway: Gateway, deploy):
    function: Function = await deploy(ECHO)
    job = (await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": "done"})).json()["id"]
    async with wire(gateway) as connection:
        packet = [
            post(function.path, str(n)) if n % 2 else get(f"/v2/{function.name}/status/{job}").encode()
            for n in range(40)
        ]
        connection.send(b"".join(packet))
        for n in range(40):
            status, _, body = await connection.reply()
            assert status == 200
            found = json.loads(body)
            assert found == n if n % 2 else found["output"] == "done"


async def test_a_failure_among_requests_in_one_packet_is_in_its_place(gateway: Gateway, deploy):
    function: Function = await deploy(ECHO)
    async with wire(gateway) as connection:
        connection.send(
            post(function.path, "1"), post("/invoke/nobody", "2"), post(function.path, "{"),
            get("/nowhere"), post(function.path, "3"),
        )  # fmt: skip
        assert [(await connection.reply())[0] for _ in range(5)] == [200, 404, 400, 404, 200]
        connection.send("what is this\r\n\r\n")
        assert (await connection.reply())[0] == 400


@pytest.mark.parametrize("told", [[], ["Connection: keep-alive"]], ids=["once", "kept"])
async def test_http_1_0(gateway: Gateway, told: list[str]):
    async with wire(gateway) as connection:
        connection.send("\r\n".join(["GET /healthz HTTP/1.0", *told, "", ""]))
        status, headers, _ = await connection.reply()
        assert status == 200
        if told:
            assert headers["connection"].lower() == "keep-alive"
            connection.send("GET /healthz HTTP/1.0\r\n\r\n")
            assert (await connection.reply())[0] == 200
        assert await connection.ended() == b""


@pytest.mark.parametrize("line", ["GET /healthz", "GET /healthz HTTP/0.9", "GET /healthz HTTP/2.0", "POST /invoke/f HTTP/0.9"])  # fmt: skip
async def test_other_versions_of_http_are_refused(gateway: Gateway, line: str):
    async with wire(gateway) as connection:
        connection.send(f"{line}\r\n\r\n")
        status, _, body = await connection.reply()
        assert (status, json.loads(body)["error"]["type"]) == (400, "malformed_request")
        assert await connection.ended() == b""


async def test_continue_is_sent_before_the_body(gateway: Gateway, deploy):
    function: Function = await deploy(ECHO)
    async with wire(gateway) as connection:
        connection.send(get(function.path, "Expect: 100-continue", "Content-Length: 1", method="POST"))
        assert (await connection.reply())[0] == 100
        connection.send("7")
        assert (await connection.reply())[2] == b"7"
    assert await status_of(gateway, post(function.path, "7", "Expect: a-miracle")) == 417


async def test_continue_is_not_sent_for_a_body_that_is_refused(gateway: Gateway, deploy, state):
    """The refusal comes instead of 100 Continue, so the client does not send the body."""
    function: Function = await deploy(ECHO, {"max_body_bytes": 1000})
    asked = ("Expect: 100-continue", "Content-Length: 2000")
    gzip_type = "Content-Type: application/gzip"
    for path, refusal, *more in (
        (function.path, 413), (f"/v2/{function.name}/run", 413), ("/cog/predictions", 413), ("/replicate/v1/files", 400),
        ("/v1/functions", 413, gzip_type),
    ):  # fmt: skip
        async with wire(gateway) as connection:
            length = asked[1] if function.name in path else f"Content-Length: {1 << 40}"
            connection.send(get(path, asked[0], length, *more, method="POST"))
            status, headers, body = await connection.reply()
            assert (status, headers["connection"]) == (refusal, "close"), (path, body)
    async with gateway_here(state, auth="always", drain_s=1.0) as closed, wire(closed) as connection:
        connection.send(get("/invoke/f", *asked, method="POST"))
        status, headers, _ = await connection.reply()
        assert (status, headers["connection"]) == (401, "close")


TYPES = {
    400: {"malformed_request"},
    404: {"unknown_route", "unknown_function"},
    405: {"method_not_allowed"},
}


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        # Targets in absolute form, as proxies send them.
        (get("http://elsewhere/healthz"), 200),
        (get("http://elsewhere/nowhere"), 404),
        (get("*", method="OPTIONS"), 404),
        (get("elsewhere:443", method="CONNECT"), 404),
        (get("//healthz"), 404),
        (get("/healthz/"), 404),
        (get("/healthz?" + "a=1&" * 1000), 200),
        (get("/v1/functions/%00"), 404),
        (get("/v1/functions/%ff"), 404),
        (get("/v1/functions/%zz"), 404),
        (get("/v1/functions/%"), 404),
        (get("/v1/functions/%2e%2e%2fetc"), 404),
        (get("/v1/functions/../functions"), 404),
        (get("/v1/functions/%ed%a0%80"), 404),
        (get("/v1/functions/" + "x" * 8000), 404),
        (get("/v1/functions/caf\xe9"), 400),
        (get("/healthz", method="HEAD"), 200),
        (get("/nowhere", method="HEAD"), 404),
        (get("/invoke/f", method="HEAD"), 405),
        (get("/invoke/f", method="OPTIONS"), 404),
        (get("/invoke/f", method="TRACE"), 405),
        (get("/healthz", method="DELETE"), 405),
        (get("/healthz", method="PATCH"), 405),
        (get("/healthz", "Upgrade: websocket", "Connection: Upgrade"), 200),
        (get("/healthz", "Upgrade: h2c", "Connection: Upgrade"), 200),
    ],
)  # fmt: skip
async def test_statuses_of_unusual_targets_and_methods(gateway: Gateway, request_: str, code: int):
    async with wire(gateway) as connection:
        connection.send(request_)
        status, headers, body = await connection.reply(head_only=request_.startswith("HEAD"))
        assert status == code
        if status == 405:
            assert headers["allow"]
        if status >= 400 and body:
            assert json.loads(body)["error"]["type"] in TYPES[status]


HEADERS = (
    "Authorization", "Idempotency-Key", "Content-Type", "Accept", "Prefer", "Last-Event-ID", "X-Request-Id", "traceparent",
    "X-Pilotflame-Function", "X-Amz-Invocation-Type", "X-Amz-Log-Type", "X-Amz-Security-Token", "ce-specversion",
    "WebHook-Request-Origin", "WebHook-Request-Rate", "X-Request-Timeout", "Content-Encoding", "Host", "Cookie", "Range",
)  # fmt: skip


@pytest.mark.parametrize(
    "value", ["\xff\xfe", "\xb2", "\xe4\xb8\x80", "9" * 5000], ids=["bytes", "two", "one", "digits"]
)
async def test_headers_that_are_not_text(gateway: Gateway, deploy, value: str):
    """Each of these headers gets a response on each of these routes, with a status below 500."""
    function: Function = await deploy(ECHO)
    name = function.name
    for header in HEADERS:
        given = f"{header}: {value}"
        requests = [
            post(function.path, "1", given),
            post(f"/v2/{name}/run", '{"input": 1}', given),
            post("/cog/predictions?function=" + name, '{"input": 1}', given),
            post(f"/lambda/2015-03-31/functions/{name}/invocations", "1", given),
            get(f"/v2/{name}/run", given, method="OPTIONS").encode(),
            get(f"/v1/functions/{name}/logs", given).encode("latin-1"),
        ]
        for sent in requests:
            status = await status_of(gateway, sent)
            assert status < 500, (header, sent)


async def test_a_key_that_is_not_text(state):
    async with gateway_here(state, auth="always") as gateway:
        for value in ("Bearer \xff\xfe", "\xff", "Bearer pf_\xb2", "AWS4-\xff"):
            assert await status_of(gateway, get("/v1/functions", f"Authorization: {value}")) == 401
        assert await status_of(gateway, get("http://x/healthz")) == 200
        assert await status_of(gateway, get("http://x//v1/functions")) == 401


NESTED = b'{"input": ' + b"[" * 5000 + b"]" * 5000 + b"}"
ODD_BODIES = {
    "deep": NESTED,
    "deep-and-open": b"[" * 100_000,
    "many-digits": b'{"input": ' + b"9" * 10_000 + b"}",
    "large-exponent": b'{"input": 1e99999}',
    "half-a-pair": b'{"input": "\\ud800"}',
    "nul": b'{"input": "\\u0000", "webhook": "\\u0000"}',
    "not-utf-8": b'{"input": "\xff"}',
    "utf-16": '{"input": 1}'.encode("utf-16"),
    "nan": b'{"input": NaN}',
    "nothing": b"",
    "same-key-twice": b'{"input": 1, "input": 2}',
    "huge-policy": b'{"input": 1, "policy": {"ttl": 1e300, "executionTimeout": -5}}',
}


@pytest.mark.parametrize("name", ODD_BODIES)
async def test_unusual_bodies(gateway: Gateway, deploy, name: str):
    function: Function = await deploy(ECHO)
    paths = (
        function.path, f"/v2/{function.name}/run", f"/v2/{function.name}/runsync", f"/cog/predictions?function={function.name}",
        f"/lambda/2015-03-31/functions/{function.name}/invocations", "/v1/functions", "/v1/functions/f/secrets/A",
    )  # fmt: skip
    for path in paths:
        for kind in ("application/json", "application/cloudevents+json", "application/octet-stream", "/;=\t"):
            status = await status_of(gateway, post(path, ODD_BODIES[name], f"Content-Type: {kind}"))
            assert status < 500, (path, kind)


# -- requests that break off or take long


@pytest.mark.parametrize(
    "encoding", ["Content-Length: 100", "Transfer-Encoding: chunked"], ids=["by-length", "in-chunks"]
)
async def test_a_body_that_breaks_off(gateway: Gateway, deploy, encoding: str):
    """No handler is called with half of a body."""
    function: Function = await deploy(TELLS)
    for path in (function.path, f"/v2/{function.name}/run", "/cog/predictions", "/v1/functions", "/v1/keys"):
        async with wire(gateway) as connection:
            connection.send(
                get(path, encoding, "Content-Type: application/json", method="POST"), "5\r\n12345\r\n"
            )
            connection.writer.write_eof()
            said = await connection.ended()
            assert said[:12] in (b"", b"HTTP/1.1 400"), said
    assert await calls(function) == ["called 'after'"]


async def test_every_route_with_a_body_has_a_time_limit(state, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pilotflame.runtime.front.http.requests.BODY_TIMEOUT_S", 0.05)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(ECHO)
        name = function.name
        paths = (
            f"/v2/{name}/run",
            f"/v2/{name}/runsync",
            "/cog/predictions",
            f"/lambda/2015-03-31/functions/{name}/invocations",
        )
        for path in paths:
            for encoding in ("Content-Length: 10", "Transfer-Encoding: chunked"):
                head = get(path, encoding, method="POST")
                assert (
                    await status_of(gateway, head, "5\r\n12345\r\n"[: 3 if "Len" in encoding else None])
                    == 408
                ), path


@pytest.mark.parametrize("asked", [0, 1], ids=["first-request", "kept-alive"])
async def test_slow_headers_do_not_hold_connections(state, asked: int, monkeypatch: pytest.MonkeyPatch):
    """200 connections send a byte of a header now and then. Meanwhile, other clients are served."""
    monkeypatch.setattr("pilotflame.runtime.front.http.connection.HEADER_TIMEOUT_S", 0.3)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(ECHO)

        async def opened() -> Wire:
            # Open one connection at a time, so that its first header arrives in time, however slow the machine is.
            connection = Wire(*await asyncio.open_connection(*gateway.address))
            for _ in range(asked):
                connection.send(get("/healthz"))
                assert (await connection.reply())[0] == 200
            return connection

        async def drip(connection: Wire) -> None:
            connection.send("GET /healthz HTTP/1.1\r\nX-Slow: ")
            closed = asyncio.create_task(connection.ended())
            while not (await asyncio.wait({closed}, timeout=0.05))[0]:
                connection.send("x")
            assert closed.result() == b""
            connection.writer.close()

        connections = [await opened() for _ in range(200)]
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for connection in connections:
                tasks.create_task(drip(connection))
            for number in range(20):
                assert await function.answer(number) == number


LONG = [f"X-Long-{number}: {'x' * 8000}" for number in range(12)]
"""Header lines of 96 KB in total."""


@pytest.mark.parametrize("asked", [0, 1], ids=["first-request", "kept-alive"])
@pytest.mark.parametrize("path", ["/healthz", "/invoke/nobody", "/nothing"])
async def test_a_header_of_more_than_64_kib_is_refused(state, asked: int, path: str):
    """The gateway refuses both a complete header and an unfinished one."""
    async with gateway_here(state) as gateway:
        for ending in ("", "\r\n\r\n"):
            async with wire(gateway) as connection:
                for _ in range(asked):
                    connection.send(get("/healthz"))
                    assert (await connection.reply())[0] == 200
                connection.send(get(path, *LONG).removesuffix("\r\n\r\n"), ending)
                status, headers, body = await connection.reply()
                found = (status, headers["connection"].lower(), json.loads(body)["error"]["type"])
                assert found == (431, "close", "headers_too_large")
                assert await connection.ended() == b""
        assert await status_of(gateway, get("/healthz", *LONG[:7])) == 200


async def test_requests_behind_a_running_one_wait_at_their_client(state, gate: Gate):
    """A client sends 17 MB of requests while an earlier request runs. The gateway reads them only after its response."""
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(
            "import gate\ndef handler(event):\n    gate.wait()\n    return event", gate=gate
        )
        async with wire(gateway) as connection:
            connection.send(post(function.path, "1"))
            arrival = await gate.next()
            behind = (
                get("/healthz", *LONG[:7])
                + get("/healthz", "X-Short: 1") * 8
                + post("/nothing", b"x" * 200_000).decode()
            )
            connection.send(behind * 64)
            sent = asyncio.create_task(connection.writer.drain())
            passed = asyncio.Event()
            asyncio.get_running_loop().call_later(0.5, passed.set)
            await passed.wait()
            assert not sent.done()
            arrival.go()
            statuses = [(await connection.reply())[0] for _ in range(1 + 64 * 10)]
            assert statuses == [200] + ([200] * 9 + [404]) * 64
            await sent


async def test_a_kept_connection_may_be_idle_for_longer_than_a_header(
    state, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    """The time limit is only for headers. It limits neither the pause between requests nor a running request."""
    monkeypatch.setattr("pilotflame.runtime.front.http.connection.HEADER_TIMEOUT_S", 0.05)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(
            "import gate\ndef handler(event):\n    gate.wait()\n    return event", gate=gate
        )
        async with wire(gateway) as connection:
            for number in range(2):
                connection.send(post(function.path, str(number)))
                arrival = await gate.next()
                passed = asyncio.Event()
                asyncio.get_running_loop().call_later(0.1, passed.set)
                await passed.wait()
                arrival.go()
                assert (await connection.reply())[2] == str(number).encode()
                passed = asyncio.Event()
                asyncio.get_running_loop().call_later(0.1, passed.set)
                await passed.wait()


# -- what it costs


def process_of(gateway: Gateway) -> psutil.Process:
    assert gateway.process is not None
    return psutil.Process(gateway.process.pid)


def rss(gateway: Gateway) -> int:
    return int(process_of(gateway).memory_info().rss)


def cpu_s(gateway: Gateway) -> float:
    times = process_of(gateway).cpu_times()
    return float(times.user + times.system)


async def test_memory_is_bounded(state):
    """Memory grows at most by the body limit of each sending connection, even if the declared or the unpacked body is larger."""
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(ECHO, {"max_body_bytes": MIB})
        assert await function.answer(1) == 1
        before = rss(gateway)
        async with contextlib.AsyncExitStack() as stack:
            wires = [await stack.enter_async_context(wire(gateway)) for _ in range(30)]
            chunk = b"%x\r\n" % (256 << 10) + bytes(256 << 10) + b"\r\n"
            for number, connection in enumerate(wires):
                if number % 2:
                    connection.send(
                        get(function.path, f"Content-Length: {19 * MIB}", method="POST"), bytes(MIB)
                    )
                else:
                    connection.send(
                        get(function.path, "Transfer-Encoding: chunked", method="POST"), *[chunk] * 8
                    )
            for connection in wires:
                status, _, body = await connection.reply()
                assert (status, json.loads(body)["error"]["type"]) == (413, "input_too_large")
        assert rss(gateway) - before < 30 * MIB + 64 * MIB

        bomb = gzip.compress(bytes(128 * MIB), 1)
        before = rss(gateway)
        for path in (function.path, f"/v2/{function.name}/run", "/cog/predictions", "/v1/keys"):
            sent = post(path, bomb, "Content-Encoding: gzip", "Content-Type: application/json")
            assert await status_of(gateway, sent) in (400, 413), path
        assert rss(gateway) - before < 64 * MIB
        assert await function.answer(1) == 1


BOMB_BYTES = 1 << 30
PACKERS = {
    "br": lambda: brotli.Compressor(quality=1),
    "zstd": lambda: zstd.ZstdCompressor(level=1),
    "gzip": lambda: zlib.compressobj(1, wbits=31),
    "deflate": lambda: zlib.compressobj(1),
}


def bomb_of(coding: str, size: int) -> bytes:
    """Return a short body that unpacks to `size` zeros."""
    packer, zeros = PACKERS[coding](), bytes(MIB)
    if coding in ("gzip", "deflate"):
        # Packing all zeros would take seconds, so pack only two parts, and repeat the part after the full flush. The checksum at the
        # end is wrong, but the gateway stops before the end.
        first, again = (packer.compress(zeros) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
        return first + again * (size // MIB - 1) + packer.flush()
    pack = packer.process if coding == "br" else packer.compress
    parts = [pack(zeros) for _ in range(size // MIB)]
    return b"".join(parts) + (packer.finish() if coding == "br" else packer.flush())


@pytest.mark.parametrize("coding", PACKERS)
async def test_a_packed_body_costs_no_more_than_the_limit_of_its_route(state, coding: str):
    """A refused body is not unpacked at all. An accepted body is unpacked only until it exceeds the limit."""
    bomb = bomb_of(coding, BOMB_BYTES)
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(ECHO, {"max_body_bytes": MIB})
        assert await function.answer(1) == 1
        before, spent = rss(gateway), cpu_s(gateway)
        headers = (f"Content-Encoding: {coding}", "Content-Type: application/json")
        for path, status in (("/nothing", 404), (function.path, 413), ("/v1/keys", 413)):
            async with wire(gateway) as connection:
                connection.send(post(path, bomb, *headers), get("/healthz"))
                assert (await connection.reply())[0] == status, path
                assert (await connection.reply())[0] == 200, path
        assert rss(gateway) - before < 64 * MIB
        # Unpacking the whole body would take seconds.
        assert cpu_s(gateway) - spent < 0.5


@pytest.mark.parametrize("coding", PACKERS)
async def test_a_packed_body_is_unpacked(gateway: Gateway, deploy, coding: str):
    packers = {"br": brotli.compress, "zstd": zstd.compress, "gzip": gzip.compress, "deflate": zlib.compress}
    function: Function = await deploy(ECHO)
    text = json.dumps("x" * 100_000).encode()
    headers = {"Content-Encoding": coding.upper()}
    answer = await function.client.post(function.path, content=packers[coding](text), headers=headers)
    assert answer.json() == "x" * 100_000
    if coding == "deflate":
        short = await function.client.post(function.path, content=packers[coding](text)[:-9], headers=headers)
        assert "not complete" in failure(short)["message"]
    broken = await function.client.post(function.path, content=b"{}" * 20, headers=headers)
    assert failure(broken)["type"] == "bad_json"


async def test_an_uploader_reads_its_refusal(gateway: Gateway):
    """The client sends the whole body before it reads."""
    async with wire(gateway) as connection:
        connection.send(post("/nothing", bytes(30 * MIB)), get("/healthz"))
        assert (await connection.reply())[0] == 404
        assert (await connection.reply())[0] == 200


async def test_an_upload_without_end_is_closed(gateway: Gateway):
    async with wire(gateway) as connection:
        connection.send(get("/nothing", "Transfer-Encoding: chunked", method="POST"))
        chunk = b"%x\r\n" % MIB + bytes(MIB) + b"\r\n"
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1024:
                connection.send(chunk)
                await connection.writer.drain()
                sent += 1
        assert sent < 1024


async def test_a_client_that_pipelines_without_reading_is_held_back(state):
    """The gateway stops reading from this client."""
    async with gateway_process(state) as gateway:
        before = rss(gateway)
        packet = (get("/healthz") * 1000).encode()
        with socket.create_connection(gateway.address) as sock:
            sock.setblocking(False)
            sent, silent = 0, 0
            # After 20 attempts without progress, the gateway has stopped reading.
            while sent < 200 * MIB and silent < 20:
                try:
                    sent += sock.send(packet)
                    silent = 0
                except BlockingIOError:
                    silent += 1
                    assert (await gateway.client.get("/healthz")).status_code == 200
            assert sent < 200 * MIB
            assert rss(gateway) - before < 64 * MIB


async def test_a_refused_body_is_not_read_for_long(gateway: Gateway, deploy):
    function: Function = await deploy(ECHO, {"max_body_bytes": 100})
    async with wire(gateway) as connection:
        connection.send(post(function.path, "1" * 200), get("/healthz"))
        status, _, body = await connection.reply()
        assert (status, json.loads(body)["error"]["type"]) == (413, "input_too_large")
        assert (await connection.reply())[0] == 200
    assert failure(await function.client.post(function.path, content=b"x" * 101))["status"] == 413


DEEP = "[" * 300 + "]" * 300
CONTEXT = base64.b64encode(f'{{"custom": {DEEP}}}'.encode()).decode()
VERTEX = "/vertex/v1/projects/p/locations/l/endpoints"
UNPASSED: dict[str, tuple[str, str, str, int]] = {
    "lambda": ("/lambda/2015-03-31/functions/{}/invocations", "1", f"X-Amz-Client-Context: {CONTEXT}", 400),
    "lambda-event": (
        "/lambda/2015-03-31/functions/{}/invocations", "1", f"X-Amz-Invocation-Type: Event\r\nX-Amz-Client-Context: {CONTEXT}", 400,
    ),
    "vertex": (VERTEX + "/{}:predict", f'{{"instances": [1], "parameters": {DEEP}}}', "X-A: 1", 400),
    "sagemaker": ("/sagemaker/endpoints/{}/invocations", "1", "X-Amzn-SageMaker-Custom-Attributes: \xff", 400),
    "torchserve": ("/torchserve/predictions/{}", "1", "X-A: \xff", 200),
}  # fmt: skip


@pytest.mark.parametrize("case", UNPASSED)
async def test_what_no_worker_can_get_ends_no_call_of_another(gateway: Gateway, deploy, case: str):
    """An error during the dispatch would end the link of the worker, and so its other calls."""
    path, body, header, status = UNPASSED[case]
    function: Function = await deploy(ECHO)
    worker = (await function.call(1)).headers["X-Worker-Id"]
    found = await status_of(
        gateway, post(path.format(function.name), body, "Content-Type: application/json", header)
    )
    assert found == status
    assert (await function.call(1)).headers["X-Worker-Id"] == worker

"""Clients' connections: data with many small parts is parsed in turns, and every request still gets its own body."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from live import LIMIT_S
from pilotflame.runtime.front.http import unparsed_data
from pilotflame.runtime.front.http.connection import ClientConnection
from pilotflame.runtime.front.http.header_limit import MAX_HEADER_BYTES
from pilotflame.runtime.front.http.unparsed_data import SLICE_BYTES, UnparsedData
from pilotflame.runtime.front.listening.open_connections import OpenConnections
from pilotflame.runtime.front.listening.origins import Origins

READ_BYTES = 256 << 10
"""The largest number of bytes that a transport reads at once."""
SMALL = 20_000
"""The number of small parts."""


def digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:8]


async def answer(request: web.BaseRequest) -> web.StreamResponse:
    """Answer with the digest of the body. On a WebSocket, send the number of messages after SMALL messages."""
    assert isinstance(request, web.Request)
    assert isinstance(request.protocol, ClientConnection)
    request.protocol.begin(request)
    if "Upgrade" in request.headers:
        sock = web.WebSocketResponse()
        await sock.prepare(request)
        count = 0
        async for _ in sock:
            count += 1
            if count == SMALL:
                await sock.send_str(f"{count}")
        return sock
    return web.Response(text=digest(await request.read()))


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    """Yield the port of a server whose connections are of the class ClientConnection."""
    runner = web.ServerRunner(web.Server(answer, request_factory=made))
    await runner.setup()
    places, server = OpenConnections(Origins(()), 100), runner.server
    assert server is not None

    def connected() -> ClientConnection:
        place = places.enter(unused, "127.0.0.1")
        assert place is not None
        return ClientConnection(server, place=place)

    unused = socket.socket()
    listener = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await runner.cleanup()
        unused.close()


def made(message, payload, protocol, writer, task) -> web.Request:
    return web.Request(message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=1 << 30)  # fmt: skip


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that records the size of each piece of data that aiohttp gets."""
    sizes, receive = [], web.RequestHandler.data_received

    def watched(connection: web.RequestHandler, data: bytes) -> None:
        sizes.append(len(data))
        receive(connection, data)

    monkeypatch.setattr(web.RequestHandler, "data_received", watched)
    return sizes


def request(body: bytes, chunk: int | None) -> bytes:
    """Return a request whose body has chunks of this size. If `chunk` is None, it has a Content-Length instead."""
    if chunk is None:
        return f"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    parts = (body[at : at + chunk] for at in range(0, len(body), chunk))
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


async def answers(port: int, pieces: list[bytes], count: int) -> list[str]:
    """Send requests in these pieces, and return the texts of the first `count` answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        texts = []
        async with asyncio.timeout(LIMIT_S):
            for _ in range(count):
                await reader.readuntil(b"\r\n\r\n")
                texts.append((await reader.readexactly(8)).decode())
        return texts
    finally:
        writer.close()


async def test_small_chunks_are_parsed_in_slices(parsed: list[int]):
    body = bytes(range(250)) * (SMALL // 250)
    async with listening() as port:
        texts = await answers(port, [request(body, 1) + request(b"next", None)], 2)
    assert texts == [digest(body), digest(b"next")]
    assert max(parsed) <= SLICE_BYTES


async def test_small_messages_of_a_websocket_are_parsed_in_slices(parsed: list[int]):
    async with (
        listening() as port,
        aiohttp.ClientSession() as session,
        session.ws_connect(f"http://127.0.0.1:{port}/") as sock,
    ):
        parsed.clear()
        assert sock._response.connection is not None
        assert sock._response.connection.transport is not None
        # Send frames of one byte, with a mask of zeros.
        sock._response.connection.transport.write(b"\x82\x81\0\0\0\0x" * SMALL)
        assert await sock.receive_str(timeout=LIMIT_S) == f"{SMALL}"
    assert max(parsed) <= SLICE_BYTES


async def test_a_body_of_known_length_is_not_cut(parsed: list[int]):
    body = bytes(8 << 20)
    async with listening() as port:
        assert await answers(port, [request(body, None)], 1) == [digest(body)]
    assert len(parsed) < len(body) / SLICE_BYTES / 4


async def test_other_work_goes_on_between_the_slices(monkeypatch: pytest.MonkeyPatch, parsed: list[int]):
    """With PARSING_S = 0, each turn parses only one slice, so the number of turns does not depend on the machine."""
    monkeypatch.setattr(unparsed_data, "PARSING_S", 0.0)
    turns = 0
    async with listening() as port:
        waiting = asyncio.ensure_future(answers(port, [request(bytes(SMALL), 1)], 1))
        while not waiting.done():
            await asyncio.sleep(0)
            turns += 1
        assert waiting.result() == [digest(bytes(SMALL))]
    assert turns > 6 * SMALL // SLICE_BYTES


BODIES = st.tuples(
    st.sampled_from([0, 1, 100, SLICE_BYTES, 100_000, 600_000]), st.sampled_from([None, 1000, 70_000])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(BODIES, min_size=1, max_size=5), st.lists(st.integers(1, 300_000), max_size=8))
async def test_requests_in_any_pieces_are_answered_in_order(bodies, cuts):
    wanted = [(bytes([number]) * size, chunk) for number, (size, chunk) in enumerate(bodies)]
    sent, pieces = b"".join(request(*one) for one in wanted), []
    for cut in cuts:
        pieces.append(sent[:cut])
        sent = sent[cut:]
    async with listening() as port:
        assert await answers(port, [*pieces, sent], len(wanted)) == [digest(body) for body, _ in wanted]


async def test_requests_behind_a_running_one_wait_at_their_client(monkeypatch: pytest.MonkeyPatch):
    """However many requests arrive, the connection buffers only a few of them, and answers all of them in order."""
    held, add = [], UnparsedData.add

    def watched(unparsed: UnparsedData, data: bytes, connection: ClientConnection) -> None:
        add(unparsed, data, connection)
        held.append(len(unparsed._data))

    monkeypatch.setattr(UnparsedData, "add", watched)
    count = 25_000
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab" * count
        writer.write(sent)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(count):
                await reader.readuntil(b"\r\n\r\n")
                assert await reader.readexactly(8) == digest(b"ab").encode()
        writer.close()
    assert max(held) <= MAX_HEADER_BYTES + 2 * READ_BYTES < len(sent) / 2


async def test_frames_that_arrive_before_the_answer_to_a_handshake_wait(parsed: list[int]):
    handshake = (
        b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(handshake + b"\x82\x81\0\0\0\0x" * SMALL)
        async with asyncio.timeout(LIMIT_S):
            assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
            assert (await reader.readexactly(2 + len(f"{SMALL}"))).endswith(f"{SMALL}".encode())
        writer.close()
    assert max(parsed) <= SLICE_BYTES


async def test_a_header_without_an_end_is_read_up_to_its_limit_also_after_a_body_in_chunks(parsed: list[int]):
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(b"first", 5))
        async with asyncio.timeout(LIMIT_S):
            await reader.readuntil(b"\r\n\r\n")
            assert (await reader.readexactly(8)).decode() == digest(b"first")
        parsed.clear()
        writer.write(
            b"GET / HTTP/1.1\r\nHost: a\r\n" + b"".join(b"X-%d: %b\r\n" % (n, b"x" * 8000) for n in range(90))
        )
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        writer.close()
    assert sum(parsed) <= MAX_HEADER_BYTES + READ_BYTES


async def test_a_parser_that_raises_closes_its_connection(monkeypatch: pytest.MonkeyPatch):
    def fail(_connection: web.RequestHandler, _data: bytes) -> None:
        raise KeyError("parser")

    async with listening() as port:
        with monkeypatch.context() as patch:
            patch.setattr(web.RequestHandler, "data_received", fail)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request(bytes(SMALL), 1))
            async with asyncio.timeout(LIMIT_S):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
        assert await answers(port, [request(b"other", None)], 1) == [digest(b"other")]


async def test_a_client_that_leaves_while_its_data_waits_is_forgotten():
    async with listening() as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(bytes(SMALL), 1)[:-5] * 2)
        await asyncio.sleep(0)
        writer.transport.abort()
        assert await answers(port, [request(b"other", None)], 1) == [digest(b"other")]

"""Sends streamed output as server-sent events: `output` for each piece, then `completed` or `error`."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from functools import partial
from typing import NotRequired

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from ....errors import PilotflameError
from ...calls.serving.invocation import Invocation, Stream
from .large_answers import ANSWERS
from .responses import invocation_headers, made
from .sliced_body import SLICE_BYTES

EVENT_STREAM_TYPE = "text/event-stream"
# If there was no event for this time, a comment is sent, because proxies close connections on which nothing is sent.
HEARTBEAT_S = 5.0
HEARTBEAT = b": waiting\n\n"
# The time after the deadline in which the last event can still be sent.
LAST_EVENT_S = 2.0
# The value of SO_LINGER for zero seconds: on closing, the kernel discards all bytes not yet delivered.
NO_LINGER = struct.pack("ii", 1, 0)
STREAM_HEADERS = {"Content-Type": EVENT_STREAM_TYPE, "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""X-Accel-Buffering makes nginx pass each event on at once. Without this header, nginx collects events in a buffer."""


class ServerSentEvent(TypedDict):
    """One event of a stream."""

    event: str
    data: str
    id: NotRequired[str]


EVENTS = {EVENT_STREAM_TYPE: ServerSentEvent}
"""The type of a response in the route table that is a stream of these events."""


def event(name: str, data: bytes, number: int = 0) -> bytes:
    """Return a server-sent event. If `number` is not 0, it is the event's id, after which a reader may resume the
    stream.
    """
    place = b"id: %d\n" % number if number else b""
    return place + b"event: %s\ndata: %s\n\n" % (name.encode(), data)


def comments(headers: Mapping[str, str]) -> bytes:
    """Return headers as comments of a stream. Use this if the stream's head was sent before the headers were known."""
    return "".join(f": {name}: {value}\n" for name, value in headers.items()).encode() + b"\n"


def accepts_events(request: web.Request) -> bool:
    return EVENT_STREAM_TYPE in request.headers.get("Accept", "")


def last_event_id(request: web.Request) -> int:
    """Return the number of the last event that a reader has received. It is 0 if the header is absent or invalid."""
    text = request.headers.get("Last-Event-ID", "0")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def abort(request: web.Request) -> None:
    """Close the connection of a request and discard unsent bytes. The caller notices that the response is not whole."""
    transport = request.transport
    if transport is not None:
        if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
        transport.abort()


class EventStream:
    """The streamed response to an invocation. Its header is sent before the first event or heartbeat."""

    def __init__(
        self, request: web.Request, invocation: Invocation, headers: Mapping[str, str] | None = None,
        heartbeat: bytes = HEARTBEAT,
    ) -> None:  # fmt: skip
        """`headers` replace the headers of the invocation and of server-sent events. If `heartbeat` is empty, send no
        heartbeats.
        """
        self.response: web.StreamResponse | None = None
        self._request, self._invocation = request, invocation
        self._headers, self._heartbeat = headers, heartbeat
        self._number = 0

    async def send_pieces(self, stream: Stream) -> None:
        """Send all pieces until the stream ends. One write sends all pieces that have arrived.

        After each write, let the worker send as many further pieces as were written.
        """
        while pieces := await self._next(stream):
            late, first = self._late_headers(), self._number + 1
            self._number += len(pieces)
            size, make = sum(map(len, pieces)), partial(self._encode, pieces, first)
            await self._write(late + await made(self._request, size, make, SLICE_BYTES))
            stream.consumed(len(pieces))

    async def end(self, error: PilotflameError | None, *, private: bool = False) -> web.StreamResponse:
        """Send the last event, which tells whether the stream failed. The status cannot tell this, because it was sent
        at the beginning.

        With `private`, an error includes the traceback.
        """
        error = error.whole if error is not None and private else error
        name, wire = ("completed", {}) if error is None else ("error", error.to_wire(private=private))
        response = await self._write(event(name, orjson.dumps(wire), self._number + 1))
        await response.write_eof()
        return response

    def abort(self) -> None:
        """Close the connection and discard unsent bytes, because the reader may never read them."""
        abort(self._request)

    def _encode(self, pieces: list[bytes], first: int) -> bytes:
        """Return the events for pieces of the output. `first` is the number of the first piece."""
        return b"".join(event("output", piece, number) for number, piece in enumerate(pieces, first))

    def _late_headers(self) -> bytes:
        """Return the invocation's headers as comments, if this is the first piece and a heartbeat has already sent the
        head; else b"".
        """
        sent = self.response is not None and not self._number
        return comments(invocation_headers(self._invocation)) if sent else b""

    async def _next(self, stream: Stream) -> list[bytes]:
        while not stream.ready:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    return await stream.take()
            except TimeoutError:
                if self._heartbeat:
                    await self._write(self._heartbeat)
        return await stream.take()

    async def _write(self, data: bytes) -> web.StreamResponse:
        """Send the response's header if it was not sent yet, then send the data. Return the response."""
        if self.response is None:
            headers = self._headers or invocation_headers(self._invocation) | STREAM_HEADERS
            self.response = web.StreamResponse(headers=headers)
            await self.response.prepare(self._request)
        await self._request.app[ANSWERS].write(self._request, self.response, data)
        return self.response

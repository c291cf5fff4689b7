"""Reads plain calls and writes their responses without aiohttp's tasks and objects. All other bytes go to aiohttp.

A call is read here if its head has the simplest form that HTTP/1.1 allows, and if it has arrived completely. These
calls and the requests of aiohttp pass the same `Chain`, so the caller sees no difference. This module uses no private
names of aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, TypeAlias

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time
from aiohttp.http import StreamWriter
from multidict import CIMultiDict, CIMultiDictProxy

from ....errors import OutputInvalid
from ..listening.open_connections import ConnectionPlace
from .chain import Chain
from .connection import KEEPALIVE_S, ClientConnection
from .requests import REQUEST_ID_HEADER, CallHeaders, Headers
from .responses import SERVER, Response, error_reply
from .sliced_body import SlicedBody

MAX_HEAD_BYTES, MAX_HEADERS = 8000, 100
"""These limits are lower than the limits of aiohttp. aiohttp reads larger heads, and refuses heads above its own limits."""
MAX_BEHIND_BYTES = 64 << 10
"""The limit of the bytes of further requests that are read while a call runs."""
NEVER_S = 1e8
Send: TypeAlias = Callable[[Response, SlicedBody | None], None]
"""Sends a response, and its body in slices if it is large."""
_HEAD = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)*)\r\n")
# Headers that ask for what only aiohttp does: another framing, a job, an interim response, headers for web pages, an upgrade.
_OTHERS = frozenset(
    ("transfer-encoding", "content-encoding", "prefer", "expect", "origin", "upgrade", "te", "trailer", "sec-websocket-key1")
)  # fmt: skip
_LENGTH = re.compile("[0-9]{1,9}")
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


@dataclass(slots=True, eq=False)
class CallHead:
    """The head of a plain call, and what was read from it. Most requests of a connection have the same head, so it is
    read only once.
    """

    sent: bytes
    path: str
    headers: Headers
    length: int
    """The bytes of the body."""
    asked: CallHeaders | None = None
    elsewhere: bool | None = None
    """True if another row of the route table serves the call; None if that is not known yet."""


class RunningCall(Protocol):
    """A plain call that runs."""

    def abandon(self) -> None:
        """End the call, because the caller has closed the connection."""


class CallTaker(Protocol):
    """The object that answers plain calls (`api/plain_calls.py`)."""

    chain: Chain
    tasks: asyncio.TaskGroup

    def take(
        self, head: CallHead, body: bytes, connection: ClientConnection, send: Send
    ) -> RunningCall | None:
        """Begin a call, and `send` its response in a later turn of the event loop. Return None if aiohttp must read the call."""


class PlainConnection(ClientConnection):
    """A client's connection that reads plain calls itself, and passes all other bytes to aiohttp.

    After a request of aiohttp, the connection reads calls again, unless aiohttp may have bytes of a further request.
    """

    __slots__ = (
        "_answered", "_behind", "_closing", "_head", "_idle_since_s", "_idle_timer", "_passed", "_pending", "_plain",
    )  # fmt: skip

    def __init__(self, server: web.Server, calls: CallTaker, *, place: ConnectionPlace) -> None:
        # Turn off aiohttp's limit for idle connections, because aiohttp does not know plain calls. `_check_idle` closes
        # idle connections.
        super().__init__(server, place=place, keepalive_s=NEVER_S)
        self._plain = calls
        self._head: CallHead | None = None
        self._pending: RunningCall | None = None
        # The bytes that have arrived behind a pending call.
        self._behind = b""
        # True if aiohttp has a part of a request, or may have one.
        self._passed = False
        self._closing = False
        self._answered: asyncio.Future[None] | None = None
        self._idle_since_s = time.monotonic()
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        return self._pending is not None or super().is_busy

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._check_idle()

    def data_received(self, data: bytes) -> None:
        if self._pending is not None:
            self._behind += data
            if len(self._behind) > MAX_BEHIND_BYTES and self.transport is not None:
                self.transport.pause_reading()
        elif self._passed or not data or self._closing or not self._read(data):
            self._pass(data)

    def _read(self, data: bytes) -> bool:
        """Begin a plain call. Return False if aiohttp must read the bytes."""
        head = self._head
        if head is None or not data.startswith(head.sent):
            head = self._head = read_head(data)
        if head is None or self.transport is None or self.writing_paused:
            return False
        start, end = len(head.sent), len(head.sent) + head.length
        if len(data) < end:
            return False
        self._pending = self._plain.take(head, data[start:end], self, self._send)
        if self._pending is None:
            return False
        self.header_arrived()
        self._behind = data[end:]
        return True

    def _pass(self, data: bytes) -> None:
        """Pass bytes to aiohttp."""
        if data:
            self._passed = True
            if self._request is None:
                self.expect_header()
        super().data_received(data)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        found = await super().finish_response(request, resp, start_time)
        self._idle_since_s = time.monotonic()
        if resp.keep_alive and not self._header.arrived:
            self._passed = False
        return found

    def _send(self, response: Response, sliced: SlicedBody | None) -> None:
        """Send the response to the pending call."""
        transport, plain = self.transport, self._plain
        if transport is None or self._pending is None:
            return
        self._closing |= plain.chain.leaving
        head, body = encode(response, closes=self._closing)
        if sliced is None or body is not response.body:
            transport.write(head + body)
            self._sent()
        else:
            transport.write(head)
            plain.tasks.create_task(self._send_slices(sliced), name="answer")

    async def _send_slices(self, sliced: SlicedBody) -> None:
        with contextlib.suppress(ConnectionError):
            await sliced.write(StreamWriter(self, asyncio.get_running_loop()))
        self._sent()

    def _sent(self) -> None:
        """End the call after its response was written. Close the connection if it is closing. Otherwise, read the bytes
        that have arrived behind the call.
        """
        self._pending, self._idle_since_s = None, time.monotonic()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
        if self.transport is None:
            return
        if self._closing:
            self.transport.close()
        elif data := self._behind:
            self._behind = b""
            self.transport.resume_reading()
            self.data_received(data)

    def _calls(self) -> bool:
        return self._pending is not None or super()._calls()

    def close(self) -> None:
        self._closing = True
        super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        self._closing = True
        if self._pending is not None:
            self._answered = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._answered], timeout=timeout)
        await super().shutdown(timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()
        super().connection_lost(exc)

    def _check_idle(self) -> None:
        """Close the connection if no request has come for KEEPALIVE_S."""
        left_s = KEEPALIVE_S if self.is_busy else self._idle_since_s + KEEPALIVE_S - time.monotonic()
        if left_s > 0:
            self._idle_timer = asyncio.get_running_loop().call_later(left_s, self._check_idle)
        else:
            self.force_close()


def read_head(data: bytes) -> CallHead | None:
    """Return the head with which the bytes of a plain call begin; None if the head is not complete, or if aiohttp must
    read the call.
    """
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if end < 4 or (found := _HEAD.fullmatch(data, 0, end)) is None:
        return None
    lines = [line.partition(":") for line in found[2].decode().split("\r\n")[:-1]]
    fields = CIMultiDict((name, value.strip(" \t")) for name, _, value in lines)
    names = {name.lower() for name in fields}
    if "host" not in names or not _OTHERS.isdisjoint(names) or not len(names) == len(lines) <= MAX_HEADERS:
        return None
    length = fields.get("Content-Length", "0")
    if fields.get("Connection", "keep-alive").lower() != "keep-alive" or not _LENGTH.fullmatch(length):
        return None
    return CallHead(data[:end], found[1].decode(), CIMultiDictProxy(fields), int(length))


def encode(response: Response, *, closes: bool = False) -> tuple[bytes, bytes]:
    """Return the head and the body of the response, or of an error response if a header cannot be sent."""
    lines = [f"{name}: {value}" for name, value in response.headers.items()]
    lines += (f"Content-Length: {len(response.body)}", f"Date: {rfc822_formatted_time()}", f"Server: {SERVER}")  # fmt: skip
    lines += ["Connection: close"] if closes else []
    text = "\r\n".join(lines)
    head = f"{_STATUS_LINES[response.status]}{text}\r\n\r\n".encode(errors="replace")
    if head.count(b"\r") == head.count(b"\n") == len(lines) + 2:
        return head, response.body
    error = OutputInvalid("A header of the answer holds a line break.", remedy="Return another Content-Type.")
    return encode(error_reply(error, response.headers[REQUEST_ID_HEADER]), closes=closes)

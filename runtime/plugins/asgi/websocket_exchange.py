"""Connects the WebSocket of a caller with the WebSocket of a web app in a worker."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import cast

from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from ....errors import DeadlineExceeded, LinkError, OutputInvalid, Overloaded, PilotflameError
from ...calls.link.stream_credit import ReadPieces
from ...calls.serving.invocation import Invocation, Stream
from ...calls.serving.revision import Revision
from ...front.http.connection import ClientConnection
from ...front.http.endless_answers import EndlessAnswers
from ...front.http.incoming_bodies import INCOMING, ArrivingBytes
from ...front.http.requests import caller_of
from ...front.http.responses import error_reply, invocation_headers
from .app_response import AppResponse
from .incoming_request import HOP_BY_HOP
from .messages import (
    ABNORMAL,
    ACCEPT,
    BYTES,
    CLOSE,
    DENY,
    NO_STATUS,
    TEXT,
    HeaderPair,
    MessageParts,
    ResponsePiece,
    decode_accept,
    decode_close,
    decode_response,
    encode_close,
    encode_message,
)

# The gateway sends a ping this often, and closes the connection if no pong comes within half of this time.
HEARTBEAT_S = 20.0
# The caller must close its side of a WebSocket within this time. An app must end within this time after its caller has
# gone.
CLOSE_S = 5.0
RESTART = "service restart"
# At most this many messages of the largest size may have arrived without being passed to the app. While one message
# is passed on, aiohttp keeps the next message and the parts of a third one.
MOST_HELD = 3
_OURS = b"sec-websocket-"


class WebSocketExchange:
    """One WebSocket, from the caller's handshake to its end. It ends if no message passes within the function's time limit."""

    def __init__(
        self, request: web.Request, revision: Revision, invocation: Invocation, stream: Stream, most: int,
        endless: EndlessAnswers,
    ) -> None:  # fmt: skip
        """`most` is the largest number of bytes of a message. The invocation must have an `input` and `idle_s`.

        `endless` ends the WebSocket when the caller's API key ends.
        """
        if invocation.input is None:
            raise LinkError("The invocation of a WebSocket has no input.")
        self._request, self._revision, self._invocation = request, revision, invocation
        self._stream, self._input, self._most, self._endless = stream, invocation.input, most, endless
        self._joined, self._read = MessageParts(most), ReadPieces()
        self._leaving = asyncio.Event()
        # True once the app has closed the WebSocket. Do not cancel the invocation then, because the app may still run.
        self._closed_by_app = False
        # The code and reason with which the caller or the gateway has closed the WebSocket.
        self._left: tuple[int, str] | None = None
        # The code and reason that `_leave` sends.
        self._farewell = (int(WSCloseCode.SERVICE_RESTART), RESTART)
        self._arriving = ArrivingBytes(request.app[INCOMING], caller_of(request).owner)
        invocation.on_leaving = self._leaving.set

    async def run(self) -> web.StreamResponse:
        """Return the response once the WebSocket has ended, or if the app has denied the handshake."""
        try:
            messages = await self._next()
            kind, data = messages.pop(0) if messages else (CLOSE, encode_close(ABNORMAL, "")[1:])
            if kind == ACCEPT:
                return await self._open(data, messages)
            if kind == DENY:
                return await self._deny(data, messages)
            if kind != CLOSE:
                raise LinkError("An app sent a message before it has accepted its WebSocket.")
            self._closed_by_app = True
            return web.Response(status=403, headers=invocation_headers(self._invocation))
        except PilotflameError as error:
            self._revision.cancel(self._invocation, error)
            return error_reply(error, self._invocation.id, invocation_headers(self._invocation)).response()
        finally:
            if not self._invocation.ended and not self._closed_by_app:
                self._revision.cancel(self._invocation)

    # -- the handshake

    async def _deny(self, data: bytes, messages: list[tuple[int, bytes]]) -> web.StreamResponse:
        """Send the response with which the app denies the handshake."""
        response = AppResponse(self._request, self._invocation)
        try:
            await response.send([decode_response(data)])
            while not response.complete:
                if not (messages := messages or await self._next()):
                    raise LinkError("An app ended before its response to the handshake was complete.")
                await response.send([_denial(kind, data) for kind, data in messages])
                messages = []
        except PilotflameError:
            if not response.started:
                raise
            response.abort()
        self._closed_by_app = response.complete
        return response

    async def _open(self, data: bytes, messages: list[tuple[int, bytes]]) -> web.StreamResponse:
        """Upgrade the connection, and pass messages on until the WebSocket ends."""
        subprotocol, headers = decode_accept(data)
        socket = web.WebSocketResponse(
            protocols=(subprotocol,) if subprotocol else (), heartbeat=HEARTBEAT_S, timeout=CLOSE_S,
            # Do not offer compression, because aiohttp would unpack messages on the event loop.
            autoclose=False, max_msg_size=self._most, compress=False,
        )  # fmt: skip
        socket.headers.extend(self._headers(headers))
        await socket.prepare(self._request)
        self._mark_active()
        if self._revision.retiring:
            self._leaving.set()
        with self._counting():
            async with self._endless.limited(caller_of(self._request)):
                await self._pass_on(socket, messages)
        if not socket.closed:
            await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"the API key has ended")
        return socket

    async def _pass_on(self, socket: web.WebSocketResponse, messages: list[tuple[int, bytes]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            others = [tasks.create_task(self._receive(socket)), tasks.create_task(self._leave(socket))]
            await self._send_all(socket, messages)
            for task in others:
                task.cancel()

    def _headers(self, headers: list[HeaderPair]) -> list[tuple[str, str]]:
        """Return the headers of the handshake: the app's, and those of the gateway that the app has not set."""
        own = [
            (name.decode(), value.decode("utf-8", "replace"))
            for name, value in headers
            if (lower := name.lower()) not in HOP_BY_HOP and not lower.startswith(_OURS)
        ]
        names = {name.lower() for name, _ in own}
        given = invocation_headers(self._invocation).items()
        return own + [(name, value) for name, value in given if name.lower() not in names]

    # -- from the app to the caller

    async def _next(self) -> list[tuple[int, bytes]]:
        """Return the next messages of the app; [] once the app has ended. Raise the error of the invocation if it has failed."""
        while pieces := await self._stream.take():
            for piece in pieces:
                if count := self._read.add(len(piece)):
                    self._stream.consumed(count)
            if found := [message for piece in pieces if (message := self._joined.add(piece)) is not None]:
                return found
        await self._invocation.wait()
        return []

    async def _send_all(self, socket: web.WebSocketResponse, messages: list[tuple[int, bytes]]) -> None:
        """Send the app's messages until the app or the caller has closed the WebSocket, and close it."""
        code, reason = int(WSCloseCode.OK), ""
        try:
            while True:
                for kind, data in messages:
                    if kind == CLOSE:
                        self._closed_by_app = True
                        code, reason = decode_close(data)
                        break
                    await self._send(socket, kind, data)
                if self._closed_by_app or not (messages := await self._next()):
                    break
        except DeadlineExceeded:
            code, reason = WSCloseCode.GOING_AWAY, "no message within the time limit"
        except (PilotflameError, UnicodeDecodeError) as error:
            code, reason = WSCloseCode.INTERNAL_ERROR, ""
            if isinstance(error, (LinkError, OutputInvalid)):
                self._revision.cancel(self._invocation, error)
        if self._left is not None:
            code, reason = self._left
        await socket.close(code=_valid(code), message=reason.encode()[:123])

    async def _send(self, socket: web.WebSocketResponse, kind: int, data: bytes) -> None:
        self._mark_active()
        try:
            if kind == TEXT:
                await socket.send_str(data.decode())
            elif kind == BYTES:
                await socket.send_bytes(data)
            else:
                raise LinkError("An app sent an unknown message to its WebSocket.")
        except ConnectionError:
            # The caller has closed the WebSocket. `_receive` tells the app, whose last messages are discarded.
            return

    # -- from the caller to the app

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """During the block, count the bytes that have arrived but were not yet passed to the app."""
        connection = cast("ClientConnection", self._request.protocol)
        connection.on_data = self._arrived
        try:
            yield
        finally:
            connection.on_data = None
            self._arriving.change(0, 0)

    def _arrived(self, size: int) -> None:
        """Count bytes. If the caller has sent too many, read no more, and close the WebSocket."""
        try:
            self._arriving.change(size, MOST_HELD * self._most)
        except Overloaded:
            self._farewell = (int(WSCloseCode.TRY_AGAIN_LATER), "too many bytes of unfinished messages")
            self._leaving.set()
            cast("ClientConnection", self._request.protocol).pause_reading()

    async def _receive(self, socket: web.WebSocketResponse) -> None:
        """Pass the caller's messages on until the WebSocket is closed, and tell the app why."""
        while True:
            message: WSMessage = await socket.receive()
            self._mark_active()
            if message.type is WSMsgType.TEXT:
                await self._pass(TEXT, message.data.encode())
            elif message.type is WSMsgType.BINARY:
                await self._pass(BYTES, message.data)
            elif message.type in (WSMsgType.CLOSING, WSMsgType.CLOSED):
                return
            else:
                break
        if message.type is WSMsgType.CLOSE:
            self._left = (message.data or NO_STATUS, message.extra or "")
        else:
            # A message was malformed or too long, or no pong has come.
            self._left = (socket.close_code or ABNORMAL, "")
        await self._tell_end(*self._left)

    async def _pass(self, kind: int, data: bytes) -> None:
        for part in encode_message(kind, data):
            await self._input.put(part)
        self._arriving.change(-len(data) - _header_bytes(len(data)), MOST_HELD * self._most)

    async def _tell_end(self, code: int, reason: str) -> None:
        """Tell the app that its WebSocket has ended. Cancel the invocation if the app does not end soon."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._input.put(encode_close(code, reason), last=True)
                await asyncio.wait([self._invocation.output])
        except TimeoutError:
            self._revision.cancel(self._invocation)

    async def _leave(self, socket: web.WebSocketResponse) -> None:
        """Wait until the worker or the revision is about to end, or too many bytes have arrived. Then close the WebSocket, so
        that the caller connects again.
        """
        await self._leaving.wait()
        self._left = self._farewell
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell_end(*self._left))
            tasks.create_task(_close(socket, *self._left))

    def _mark_active(self) -> None:
        self._invocation.mark_active(time.monotonic())


def _denial(kind: int, data: bytes) -> ResponsePiece:
    if kind != DENY:
        raise LinkError("An app sent a message to a WebSocket whose handshake it denies.")
    return decode_response(data)


def _header_bytes(size: int) -> int:
    """Return the size of the header, with the mask, of a caller's frame that has `size` bytes of data."""
    return 6 if size < 126 else 8 if size < 1 << 16 else 14


async def _close(socket: web.WebSocketResponse, code: int, reason: str) -> None:
    await socket.close(code=code, message=reason.encode())


def _valid(code: int) -> int:
    """Return `code`, or another code if `code` may not be sent. An app may pass on NO_STATUS or ABNORMAL, for example."""
    if code in (NO_STATUS, ABNORMAL):
        return int(WSCloseCode.OK)
    sendable = 1000 <= code <= 1014 and code != 1004
    return code if sendable or 3000 <= code <= 4999 else int(WSCloseCode.INTERNAL_ERROR)

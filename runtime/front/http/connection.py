"""Extends aiohttp's client connections: a time limit for headers, a place in `OpenConnections`, typed errors, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from aiohttp import hdrs, web

from ....errors import MalformedRequest, PilotflameError
from ..listening.open_connections import ConnectionPlace
from .header_limit import DISCARDED_BYTES, MAX_HEADER_BYTES, HeaderLimit, headers_too_large
from .requests import CALLS, awaits_continue
from .responses import SERVER, error_reply
from .unparsed_data import UnparsedData

BEGINNING = "/invoke/"
MAX_REASON_CHARS = 200
# The time limit for a header, and for a TLS handshake. A header has at most 64 KiB, which a slow line transfers in a
# second. A longer limit would help only clients that keep connections open without sending requests.
HEADER_TIMEOUT_S = 10.0
KEEPALIVE_S = 75.0
DISCARD_S, DISCARD_BYTES = 2.0, 64 << 20
"""The limits of time and size for discarding the rest of a body that no handler has read."""
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


class ClientConnection(web.RequestHandler):
    """A client's connection. It is closed if the header of a request does not arrive in time."""

    __slots__ = (
        "_header",
        "_header_timer",
        "_lost",
        "_place",
        "_request",
        "_unparsed",
        "discards",
        "on_data",
    )

    def __init__(
        self, server: web.Server, *, place: ConnectionPlace, keepalive_s: float = KEEPALIVE_S
    ) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), keepalive_timeout=keepalive_s,
            # Turn off what aiohttp would do with bodies: `content_coding` decompresses bodies when they are read, and
            # `discard_unread_body` discards the rest of unread bodies.
            auto_decompress=False, lingering_time=0.0,
            access_log=None,  # type: ignore[arg-type]
        )  # fmt: skip
        self._header_timer: asyncio.TimerHandle | None = None
        self._header, self._place = HeaderLimit(), place
        self._request: web.Request | None = None
        self._lost: asyncio.Future[None] | None = None
        self._unparsed = UnparsedData(place.take_turn, self._header)
        self.discards = False
        """True while the connection discards the rest of a request whose response has been sent."""
        self.on_data: Callable[[int], None] | None = None
        """Is called with the number of bytes that have arrived, before they are parsed."""

    @property
    def is_busy(self) -> bool:
        """True if a request is running whose response has not been sent."""
        return self._request is not None and not self.discards

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._place.connection = self
        super().connection_made(transport)
        self.expect_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.header_arrived()
        self._place.leave()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not data:
            # aiohttp calls this without data to parse the data that it has buffered.
            return super().data_received(data)
        if self.on_data is not None:
            self.on_data(len(data))
        fits = self._unparsed.is_socket or self._header.add(data)
        if not (fits or self._header.arrived):
            return self._refuse_header()
        if self._unparsed.takes(data):
            self._unparsed.add(data, self)
        else:
            super().data_received(data)
            if not fits:
                self._unparsed.go_on(self)
        return None

    def parse(self, data: bytes) -> None:
        super().data_received(data)

    def begin(self, request: web.Request) -> None:
        """Note that a request runs. aiohttp has read its header."""
        self.header_arrived()
        self._request, self.discards = request, False
        self._unparsed.body = request.content
        socket = hdrs.UPGRADE in request.headers and web.WebSocketResponse().can_prepare(request)
        chunked = hdrs.TRANSFER_ENCODING in request.headers
        crowded = self._header.size > MAX_HEADER_BYTES
        self._header.begin(
            None if socket else request.content, None if socket or chunked else request.content_length or 0
        )
        if crowded:
            self._unparsed.go_on(self)

    def set_parser(self, parser: Any, data_received_cb: Callable[[], None] | None = None) -> None:
        """Begin a WebSocket. aiohttp calls this once the handshake has been answered. Before, aiohttp itself limits
        the bytes that it buffers.
        """
        self._unparsed.is_socket, self._unparsed.body = True, None
        super().set_parser(parser, data_received_cb)
        self._unparsed.go_on(self)

    def pause_reading(self) -> None:
        self._unparsed.full = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading if aiohttp has paused it. aiohttp calls this for each part of a body that is read, even if it
        has not paused.
        """
        if self._unparsed.full:
            self._unparsed.full = False
            super().resume_reading(resume_parser)
            self._unparsed.go_on(self)

    def _refuse_header(self) -> None:
        """Respond with an error to an unfinished header that is too large. Discard the rest of the data, so that the
        client can read the response.
        """
        if self.transport is None or self._header.size > DISCARDED_BYTES:
            return self.abort()
        self.transport.pause_reading()
        self._place.take_turn(self._discard_on)
        if self.discards:
            return None
        self.discards = True
        self.header_arrived()
        reply = error_reply(headers_too_large())
        sent = {
            **reply.headers,
            "Server": SERVER,
            "Content-Length": f"{len(reply.body)}",
            "Connection": "close",
        }
        lines = [_STATUS_LINES[reply.status], *(f"{name}: {value}" for name, value in sent.items())]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n\r\n" + reply.body)
        asyncio.get_running_loop().call_later(DISCARD_S, self.force_close)
        return None

    def _discard_on(self) -> None:
        if self.transport is not None:
            self.transport.resume_reading()

    def admitted(self) -> None:
        """Note that the gateway has admitted a request on this connection."""
        if not self._place.admitted:
            self._place.admit()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Let aiohttp send a response. Then note that its request no longer runs."""
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._request, self.discards, self._unparsed.body = None, False, None
            self._header.responded()
            self._unparsed.go_on(self)

    def finish(self) -> asyncio.Future[None] | None:
        """Close the connection after the present response. Return a future that is done once the connection is closed.

        Return None and leave the connection open if no invocation runs and the write buffer is empty. A request that
        waits for something else, such as the next line of a log, is not an invocation.
        """
        transport = self.transport
        if transport is None or not (self._calls() or transport.get_write_buffer_size()):
            return None
        self._lost = asyncio.get_running_loop().create_future()
        if self.is_busy:
            self.close()
        else:
            # The transport sends its write buffer before it closes.
            transport.close()
        return self._lost

    def _calls(self) -> bool:
        """Return True if a request waits for an invocation."""
        request = self._request
        return request is not None and (
            request.path == "/" or request.path.startswith(BEGINNING) or CALLS in request
        )

    def abort(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500,
        exc: BaseException | None = None, message: str | None = None,
    ) -> web.StreamResponse:  # fmt: skip
        """Return the typed error for a malformed request or a bug of the gateway.

        aiohttp closes the connection after this response. A malformed request is not logged, because any client could
        then fill the disk with log lines.
        """
        if status == HTTPStatus.BAD_REQUEST:
            reason = (message or "").partition("\n")[0][:MAX_REASON_CHARS].rstrip(":. ")
            error: PilotflameError = MalformedRequest(f"Malformed HTTP request: {reason}.")
        else:
            response = super().handle_error(request, status, exc, message)
            if status != HTTPStatus.INTERNAL_SERVER_ERROR:
                return response
            error = PilotflameError("The gateway failed.", remedy="This is a bug; see the gateway's log.")
        response = error_reply(error).response()
        response.headers["Server"] = SERVER
        response.force_close()
        return response

    def header_arrived(self) -> None:
        """Stop the timer that would close the connection."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def expect_header(self) -> None:
        """Close the connection if no header arrives in time."""
        if self._header_timer is None:
            loop = asyncio.get_running_loop()
            self._header_timer = loop.call_later(HEADER_TIMEOUT_S, self.force_close)


async def discard_unread_body(request: web.Request, response: web.StreamResponse) -> None:
    """Discard the rest of a body after the response, within limits. Then aiohttp closes the connection.

    A client that sends its body before it reads the response would lose the response if the connection was closed at
    once: if a socket is closed with unread bytes, the kernel resets the connection.
    """
    content = request.content
    if content.is_eof() or awaits_continue(request):
        return
    size = 0
    # Ignore errors of the body, because the response has been sent.
    with contextlib.suppress(TimeoutError, web.RequestPayloadError, ConnectionError):
        await response.prepare(request)
        await response.write_eof()
        if isinstance(request.protocol, ClientConnection):
            request.protocol.discards = True
        async with asyncio.timeout(DISCARD_S):
            while size < DISCARD_BYTES and (part := await content.readany()):
                size += len(part)

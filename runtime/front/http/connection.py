"""Extends aiohttp's client connections with a time limit for request headers, a place, typed errors, unread bodies and the fast path.

Only `FastConnection` and `encode` use private names of aiohttp. If the installed aiohttp lacks one of them,
the server uses `ClientConnection` instead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol, cast

from aiohttp import hdrs, helpers, http_writer, web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader
from multidict import CIMultiDict

from ....errors import MalformedRequest, OutputInvalid, PilotflameError
from .header_limit import MAX_HEADER_BYTES, HeaderLimit, headers_too_large, too_large
from .large_answers import LargeAnswers, SlicedWrite
from .open_connections import ConnectionPlace
from .requests import CALLS, awaits_continue
from .responses import SERVER, Handler, Response, error_reply
from .sliced_body import SLICE_BYTES

BEGINNING = "/invoke/"
MAX_REASON_CHARS = 200
KEEPALIVE_S = 75.0
DISCARD_S, DISCARD_BYTES = 2.0, 64 << 20
"""The limits of what is thrown away of a body that is not read, or of a header that is too large."""
INTERNALS = (
    "_close", "_current_request", "_handler_waiter", "_keepalive_handle", "_keepalive_timeout", "_loop", "_manager", "_messages",
    "_next_keepalive_close_time", "_parser", "_paused", "_process_keepalive", "_reading_paused", "_request_count",
    "_request_in_progress", "_waiter", "resume_reading",
)  # fmt: skip
"""The names of `web.RequestHandler` that `FastConnection` uses. aiohttp may change these names in any release."""
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}" for status in HTTPStatus}


class TakenRequest(Protocol):
    """A request that the fast path handles. The connection reports its events to it."""

    @property
    def owner(self) -> str:
        """The id of the caller's API key."""

    def abandon(self) -> None:
        """The caller has closed the connection."""


class RequestTaker(Protocol):
    """The fast path, as connections see it."""

    @property
    def answers(self) -> LargeAnswers: ...

    def take(
        self, message: RawRequestMessage, payload: StreamReader, transport: asyncio.Transport,
        send: Callable[[Response], None],
    ) -> TakenRequest | None:  # fmt: skip
        """Handle a request that has arrived completely, or return None. `send` sends its response."""


class ClientConnection(web.RequestHandler):
    """A client's connection. It is closed if the header of its first request does not arrive in time."""

    __slots__ = ("_header", "_header_timeout_s", "_header_timer", "_place", "discards")

    def __init__(
        self, server: web.Server, *, header_timeout_s: float, place: ConnectionPlace | None = None
    ) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), keepalive_timeout=KEEPALIVE_S,
            # `content_coding` unpacks bodies where they are read, and `discard_unread_body` discards the others.
            auto_decompress=False, lingering_time=0.0,
            access_log=None,  # type: ignore[arg-type]
        )  # fmt: skip
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._header, self._place = HeaderLimit(), place
        self.discards = False
        """True while it throws away the rest of a request whose response has been sent."""

    @property
    def is_busy(self) -> bool:
        """True if a request is running, as far as aiohttp's public names show: False before the first header."""
        return self._header_timer is None and not self.discards

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._place is not None:
            self._place.connection = self
        super().connection_made(transport)
        self._expect_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.header_arrived()
        if self._place is not None:
            self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        fits = self._header.add(data)
        if fits or self._header.arrived:
            super().data_received(data)
        else:
            self._refuse_header()
        if not fits and self._header.arrived and self.transport is not None:
            # The requests behind the running one wait at their client.
            self.transport.pause_reading()

    def begin(self, content: StreamReader | None) -> None:
        """Note that a request runs, whose body is `content`; None if it is a WebSocket."""
        self._resume()
        self._header.begin(content)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, as aiohttp does, and note that the next request may begin."""
        sent = await super().finish_response(request, resp, start_time)
        self._end_request()
        return sent

    def _end_request(self) -> None:
        self._resume()
        self._header.expect()

    def _resume(self) -> None:
        if self._header.size > MAX_HEADER_BYTES and self.transport is not None:
            self.transport.resume_reading()

    def _refuse_header(self) -> None:
        """Answer an unfinished header that is too large. Throw the rest away, so that its client reads the answer."""
        if self.transport is None or self.discards:
            if self._header.size > DISCARD_BYTES:
                self.abort()
            return
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

    def admitted(self) -> None:
        """Note that the gateway has admitted a request on this connection."""
        if self._place is not None and not self._place.admitted:
            self._place.admit()

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
        fill the disk so.
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

    def _expect_header(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(self._header_timeout_s, self.force_close)


class FastConnection(ClientConnection):
    """A client's connection that offers requests to the fast path, after aiohttp has parsed and checked them.

    A request is offered if it has arrived completely and no other request waits on this connection.
    """

    __slots__ = ("_early", "_fast_path", "_large", "_lost", "_parked_waiter", "_pending")

    def __init__(
        self, server: web.Server, fast_path: RequestTaker, *, header_timeout_s: float, place: ConnectionPlace | None = None
    ) -> None:  # fmt: skip
        super().__init__(server, header_timeout_s=header_timeout_s, place=place)
        self._fast_path = fast_path
        # What arrives before aiohttp's task waits for the first request; None from then on.
        self._early: list[bytes] | None = []
        self._pending: TakenRequest | None = None
        self._large: SlicedWrite | None = None
        self._lost: asyncio.Future[None] | None = None
        # The future on which aiohttp's task waits for the next request. It is kept here, and not in
        # `_waiter`, while the fast path handles a request, so that aiohttp's task does not wake up.
        self._parked_waiter: asyncio.Future[None] | None = None

    @property
    def is_busy(self) -> bool:
        return self._request_in_progress and not self.discards

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # After the first step of aiohttp's task. Before it, requests would miss the fast path.
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        early, self._early = self._early, None
        if early and self.transport is not None:
            self.data_received(b"".join(early))

    def data_received(self, data: bytes) -> None:
        if self._early is not None:
            self._early.append(data)
            return
        count = self._request_count
        # Hide `_waiter` from aiohttp. Otherwise aiohttp would set its result, and so wake its task up before the fast
        # path sees the request.
        waiter, self._waiter = self._waiter, None
        super().data_received(data)
        idle = waiter is not None and not waiter.done()
        if self._request_count != count:
            self.header_arrived()
            if waiter is not None and idle:
                if self._enter_fast_path(waiter):
                    return
                waiter.set_result(None)
        self._waiter = waiter
        if self._request_count == count and self._header_timer is None and idle:
            # The header of the next request has begun to arrive, but is not complete.
            self._expect_header()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Resume reading if it is paused, which is rare. aiohttp calls this after every body."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._large is not None:
            self._large.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._large is not None:
            self._large.resume()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._large is not None:
            self._large.stop()
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        super().connection_lost(exc)

    def finish(self) -> asyncio.Future[None] | None:
        """Close the connection after the present response. Return a future that is done once the connection is closed.

        Return None and leave the connection open if no invocation runs and the write buffer is empty. A request that
        waits for something else, such as the next line of a log, is not an invocation.
        """
        transport, request = self.transport, self._current_request
        if transport is None:
            return None
        calls = request is not None and (
            request.path == "/" or request.path.startswith(BEGINNING) or CALLS in request
        )
        if not (calls or self._pending is not None or transport.get_write_buffer_size()):
            return None
        self._lost = self._loop.create_future()
        if self._request_in_progress:
            self._close = True
        else:
            # The transport sends its write buffer before it closes.
            transport.close()
        return self._lost

    def _end_request(self) -> None:
        # A request that waits has begun to arrive.
        if not self._messages:
            super()._end_request()

    def _enter_fast_path(self, waiter: asyncio.Future[None]) -> bool:
        """Offer the request that has arrived to the fast path. Return True if the fast path handles it."""
        if len(self._messages) != 1 or self._paused or self._reading_paused:
            return False
        parser, manager, transport = self._parser, self._manager, self.transport
        if parser is None or manager is None or transport is None:
            return False
        message, payload = self._messages[0]
        if not isinstance(message, RawRequestMessage):
            return False
        if not payload.is_eof() or payload.exception() is not None or too_large(message.raw_headers):
            return False
        pending = self._fast_path.take(message, payload, transport, self._send)
        if pending is None:
            return False
        self.admitted()
        self.begin(payload)
        self._messages.clear()
        parser.message_consumed()
        manager.requests_count += 1
        self._pending, self._parked_waiter, self._waiter = pending, waiter, None
        # aiohttp's shutdown waits while this is true.
        self._request_in_progress = True
        return True

    def _send(self, response: Response) -> None:
        """Send the response to the pending request."""
        transport, pending = self.transport, self._pending
        if transport is None or pending is None:
            self._sent()
            return
        head, body = encode(response)
        if len(body) <= SLICE_BYTES:
            transport.write(head + body)
            self._sent()
        else:
            transport.write(head)
            self._large = SlicedWrite(self._fast_path.answers, pending.owner, transport, body, self._sent)
            self._large.begin(paused=self._paused)

    def _sent(self) -> None:
        """Let aiohttp's task wait for the next request again."""
        self._large = None
        self._end_request()
        self._pending, self._waiter, self._parked_waiter = None, self._parked_waiter, None
        self._request_in_progress = False
        if self._handler_waiter is not None:
            self._handler_waiter.set_result(None)
        if self.transport is None or self._waiter is None:
            return
        # aiohttp sets `_close` when a shutdown begins.
        if self._close:
            self.force_close()
        elif self._messages:
            self._waiter.set_result(None)
        else:
            close_s = self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
            if self._keepalive_handle is None:
                self._keepalive_handle = self._loop.call_at(close_s, self._process_keepalive)


def missing_internals() -> list[str]:
    """Return the private names that the fast path needs but the installed aiohttp does not have."""
    missing = [name for name in INTERNALS if not hasattr(web.RequestHandler, name)]
    return missing + ([] if hasattr(http_writer, "_serialize_headers") else ["_serialize_headers"])


@web.middleware
async def header_timer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection that a header has arrived. `FastConnection` does not need this: aiohttp's private names show
    it when a header has arrived.
    """
    if isinstance(request.protocol, ClientConnection):
        request.protocol.header_arrived()
    return await handler(request)


@web.middleware
async def discard_unread_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Throw the rest of a body away after the response, within limits. Then aiohttp closes the connection.

    A client that sends its body before it reads the response would lose the response if the connection was closed at
    once: if a socket is closed with unread bytes, the kernel resets the connection.
    """
    if isinstance(request.protocol, ClientConnection):
        socket = hdrs.UPGRADE in request.headers and web.WebSocketResponse().can_prepare(request)
        request.protocol.begin(None if socket else request.content)
    response = await handler(request)
    content = request.content
    if not content.is_eof() and not awaits_continue(request):
        await response.prepare(request)
        await response.write_eof()
        size = 0
        if isinstance(request.protocol, ClientConnection):
            request.protocol.discards = True
        # The body may be broken, which changes nothing: the response has been sent.
        with contextlib.suppress(TimeoutError, web.RequestPayloadError, ConnectionError):
            async with asyncio.timeout(DISCARD_S):
                while size < DISCARD_BYTES and (part := await content.readany()):
                    size += len(part)
    return response


def encode(response: Response) -> tuple[bytes, bytes]:
    """Return the head and the body of the response, or of an error response if a header holds a line break."""
    fixed = {"Date": helpers.rfc822_formatted_time(), "Server": SERVER}
    headers = {**response.headers, "Content-Length": str(len(response.body)), **fixed}
    fields = cast("CIMultiDict[str]", headers)
    try:
        head: bytes = http_writer._serialize_headers(_STATUS_LINES[response.status], fields)  # noqa: SLF001
    except ValueError:
        error = OutputInvalid("The answer's Content-Type holds a line break.", remedy="Return another one.")
        return encode(error_reply(error, response.headers["X-Request-Id"]))
    return head, response.body

"""The connection: aiohttp's, with a time limit for the header of every request, and typed errors for what is no HTTP.

A request that is whole and plain may be taken by the lane: it is answered without a task and a walk through the routes,
which would cost more than all the rest of an invocation. aiohttp has read and checked it as it does all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Protocol

from aiohttp import web
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from ...errors import MalformedRequest, PilotflameError
from .responses import error_response

MAX_REASON_CHARS = 200


class PendingRequest(Protocol):
    """A request that the lane has taken and not answered yet."""

    def abandon(self) -> None:
        """Its caller has gone."""


class Taker(Protocol):
    """What may take requests before aiohttp does: the lane."""

    def take(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        transport: asyncio.Transport,
        send: Callable[[bytes], None],
    ) -> PendingRequest | None:
        """None: it goes the ordinary way. Otherwise `send` is called with all of the response, after this returns."""


class ClientConnection(web.RequestHandler):
    """Hangs up if a request's header does not arrive in time; of the first one, from when the connection was made.

    aiohttp has no such limit: without it, who sends a byte now and then holds a connection for as long as he likes.
    """

    __slots__ = ("_header_timeout_s", "_header_timer", "_lane", "_parked", "_passage")

    def __init__(
        self, server: web.Server, lane: Taker, *, header_timeout_s: float, keepalive_s: float
    ) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), keepalive_timeout=keepalive_s,
            access_log=None,  # type: ignore[arg-type]  # as aiohttp's own runners pass it on
        )  # fmt: skip
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._lane = lane
        self._passage: PendingRequest | None = None
        # aiohttp's own wait for the next request, kept from it while the lane has one.
        self._parked: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        count = self._request_count
        waiter, self._waiter = self._waiter, None  # aiohttp is not woken before the lane has had a look
        super().data_received(data)
        idle = waiter is not None and not waiter.done()
        if self._request_count != count:
            self._forget_header()
            if waiter is not None and idle:
                if self._enter_lane(waiter):
                    return
                waiter.set_result(None)
        self._waiter = waiter
        if self._request_count == count and self._header_timer is None and idle:
            self._expect_header()  # it waits for a request, and this was no more than a part of a header

    def resume_reading(self, resume_parser: bool = True) -> None:
        """aiohttp asks for it twice for every body; nearly none has ever been held up."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_header()
        passage, self._passage = self._passage, None
        if passage is not None:
            passage.abandon()
        super().connection_lost(exc)

    def _enter_lane(self, waiter: asyncio.Future[None]) -> bool:
        """Whether the lane has taken the one request that is here."""
        if len(self._messages) != 1 or self._paused or self._reading_paused:
            return False
        parser, manager, transport = self._parser, self._manager, self.transport
        if parser is None or manager is None or transport is None:
            return False
        message, payload = self._messages[0]
        if (
            not isinstance(message, RawRequestMessage)
            or not payload.is_eof()
            or payload.exception() is not None
        ):
            return False
        passage = self._lane.take(message, payload, transport, self._leave_lane)
        if passage is None:
            return False
        self._messages.clear()
        parser.message_consumed()
        manager.requests_count += 1
        self._passage, self._parked, self._waiter = passage, waiter, None
        self._request_in_progress = True  # a shutdown waits for it, as for all others
        return True

    def _leave_lane(self, answer: bytes) -> None:
        """Sends the answer of the request that the lane took; from here on aiohttp waits for the next one again."""
        self._passage, self._waiter, self._parked = None, self._parked, None
        self._request_in_progress = False
        if self._handler_waiter is not None:
            self._handler_waiter.set_result(None)
        if self.transport is None or self._waiter is None:
            return
        self.transport.write(answer)
        if self._close:  # a shutdown has begun meanwhile
            self.force_close()
        elif self._messages:
            self._waiter.set_result(None)
        else:
            self._await_next()

    def _await_next(self) -> None:
        close_s = self._loop.time() + self._keepalive_timeout
        self._next_keepalive_close_time = close_s
        if self._keepalive_handle is None:
            self._keepalive_handle = self._loop.call_at(close_s, self._process_keepalive)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP is not logged: whoever reaches the port could fill the disk with it."""
        error: PilotflameError
        if status == HTTPStatus.BAD_REQUEST:
            reason = (message or "").partition("\n")[0][:MAX_REASON_CHARS].rstrip(":. ")
            error = MalformedRequest(f"This is not HTTP as it is spoken here: {reason}.")
        else:
            response = super().handle_error(request, status, exc, message)
            if status != HTTPStatus.INTERNAL_SERVER_ERROR:
                return response
            error = PilotflameError("The gateway failed.", remedy="This is a bug; its log says where.")
        response = error_response(error)
        response.force_close()
        return response

    def _expect_header(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(self._header_timeout_s, self.force_close)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

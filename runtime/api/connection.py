"""The connection: aiohttp's, with a time limit for the header of every request, and typed errors for what is no HTTP."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from aiohttp import web

from ...errors import MalformedRequest, PilotlightError
from .answer import error_response

MAX_REASON_CHARS = 200


class Connection(web.RequestHandler):
    """Hangs up if a request's header does not arrive in time; of the first one, from when the connection was made.

    aiohttp has no such limit: without it, who sends a byte now and then holds a connection for as long as he likes.
    """

    __slots__ = ("_header_timeout_s", "_header_timer")

    def __init__(self, server: web.Server, *, header_timeout_s: float, keepalive_s: float) -> None:
        super().__init__(
            server, loop=asyncio.get_running_loop(), keepalive_timeout=keepalive_s,
            access_log=None,  # type: ignore[arg-type]  # as aiohttp's own runners pass it on
        )  # fmt: skip
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        count = self._request_count
        super().data_received(data)
        if self._request_count != count:
            self._forget_header()
        elif self._header_timer is None and self._waiter is not None and not self._waiter.done():
            self._expect_header()  # it waits for a request, and this was no more than a part of a header

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_header()
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no HTTP is not logged: whoever reaches the port could fill the disk with it."""
        error: PilotlightError
        if status == HTTPStatus.BAD_REQUEST:
            reason = (message or "").partition("\n")[0][:MAX_REASON_CHARS].rstrip(":. ")
            error = MalformedRequest(f"This is not HTTP as it is spoken here: {reason}.")
        else:
            response = super().handle_error(request, status, exc, message)
            if status != HTTPStatus.INTERNAL_SERVER_ERROR:
                return response
            error = PilotlightError("The gateway failed.", remedy="This is a bug; its log says where.")
        response = error_response(error)
        response.force_close()
        return response

    def _expect_header(self) -> None:
        self._header_timer = asyncio.get_running_loop().call_later(self._header_timeout_s, self.force_close)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

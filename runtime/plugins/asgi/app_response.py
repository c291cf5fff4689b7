"""Sends the response of a web app without buffering it. aiohttp's middlewares see it like any other response."""

from __future__ import annotations

from functools import partial

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter

from ...calls.serving.invocation import Invocation
from ...front.http.event_stream import abort
from ...front.http.responses import invocation_headers
from .messages import ResponsePiece
from .response_encoder import ResponseEncoder


class AppResponse(web.StreamResponse):
    """A response that `send` has already sent when the route handler returns it.

    aiohttp sends nothing more. It only reads the status, and whether to close the connection.
    """

    def __init__(self, request: web.Request, invocation: Invocation) -> None:
        super().__init__()
        self._to = request
        self._own_headers = partial(invocation_headers, invocation)
        self._encoder = ResponseEncoder(
            head=request.method == hdrs.METH_HEAD,
            keeps=request.keep_alive,
            chunks=request.version >= HttpVersion11,
            shared=hdrs.ORIGIN in request.headers,
        )

    @property
    def started(self) -> bool:
        return self._encoder.started

    @property
    def complete(self) -> bool:
        return self._encoder.complete

    # -- what aiohttp calls once the handler has returned the response

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        pass

    @property
    def keep_alive(self) -> bool | None:
        return self._encoder.keeps

    def force_close(self) -> None:
        self._encoder.keeps = False

    # -- what the plugin calls

    async def send(self, pieces: list[ResponsePiece]) -> None:
        """Send pieces in one write. Raise OutputInvalid if they are not a valid HTTP response."""
        encoder = self._encoder
        if not encoder.status:
            encoder.begin(pieces[0], self._own_headers)
            self.set_status(encoder.status)
            self.headers.extend(encoder.headers)
            await self._to.app.on_response_prepare.send(self._to, self)
            encoder.headers = self.headers
        await self._to.writer.write(encoder.encode(pieces))

    def abort(self) -> None:
        """Close the connection, so that the caller notices that the response is not whole."""
        self.force_close()
        abort(self._to)

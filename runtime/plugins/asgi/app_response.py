"""Sends the response of a web app: its status and headers as the app sent them, and its body without buffering."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time

from ....errors import OutputInvalid
from ...http.event_stream import abort
from ...http.responses import invocation_headers
from ...serving.invocation import Invocation
from .incoming_request import HOP_BY_HOP
from .messages import ResponsePiece, check_head

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
_BODILESS = (204, 304)
# The gateway adds to these headers, unless the app has set them.
_SERVER, _CROSS_ORIGIN = b"server", (b"server", b"vary", b"access-control-allow-origin")


class AppResponse(web.StreamResponse):
    """A response whose header block is bytes of the app. aiohttp would read and write it again, and change its bytes."""

    def __init__(self, request: web.Request, invocation: Invocation) -> None:
        super().__init__()
        self._to, self._invocation = request, invocation
        self._keeps, self._chunked_body = request.keep_alive is not False, False
        self._bodiless = request.method == hdrs.METH_HEAD
        # The bytes of the body that are missing by the app's Content-Length.
        self._missing: int | None = None
        self.started = self.complete = False

    # -- what aiohttp calls once the handler has returned the response

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        pass

    @property
    def keep_alive(self) -> bool | None:
        return self._keeps

    def force_close(self) -> None:
        self._keeps = False

    # -- what the plugin calls

    async def send(self, pieces: list[ResponsePiece]) -> None:
        """Send pieces in one write. Raise OutputInvalid if they are no response of HTTP."""
        data, complete = list[bytes](), self.complete
        for piece in pieces:
            begun = self.started or bool(data)
            if bool(piece.status) is begun or complete:
                raise OutputInvalid("The pieces of the response have a wrong order.")
            if not begun:
                data.append(await self._begin(piece))
            data.append(self._as_sent(piece.body, last=piece.last))
            complete = piece.last
        self.started, self.complete = True, complete
        await self._to.writer.write(b"".join(data))

    def abort(self) -> None:
        """Close the connection, so that the caller notices that the response is not whole."""
        self._keeps = False
        abort(self._to)

    async def _begin(self, piece: ResponsePiece) -> bytes:
        """Return the status line and the headers."""
        check_head(piece.head)
        self.set_status(piece.status)
        if piece.status < 200:
            raise OutputInvalid(f"The app responded with status {piece.status}, which is no final status.")
        lines = self._app_lines(piece.head)
        self._bodiless = self._bodiless or piece.status in _BODILESS
        framing = self._framing(piece)
        await self._to.app.on_response_prepare.send(self._to, self)
        if not self._keeps:
            self.headers[hdrs.CONNECTION] = "close"
        elif self._to.version < HttpVersion11:
            self.headers[hdrs.CONNECTION] = "keep-alive"
        own = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()]).encode()
        status = _STATUS_LINES.get(piece.status) or b"HTTP/1.1 %d \r\n" % piece.status
        return b"".join((status, *lines, own, framing))

    def _app_lines(self, head: bytes) -> list[bytes]:
        """Return the app's lines. Put the gateway's own headers, unless the app has set them, into `headers`."""
        kept, names = [], set[bytes]()
        shared = _CROSS_ORIGIN if hdrs.ORIGIN in self._to.headers else (_SERVER,)
        for line in head.splitlines(keepends=True):
            name, _, value = line.partition(b": ")
            name = name.lower()
            if name in HOP_BY_HOP:
                continue
            if name == b"content-length":
                self._missing = self._length(value)
                continue
            if name in shared:
                self.headers.add(name.decode(), value.decode("utf-8", "replace").strip())
                continue
            names.add(name)
            kept.append(line)
        self.headers.extend(
            {
                name: value
                for name, value in invocation_headers(self._invocation).items()
                if name.lower().encode() not in names
            }
        )
        if b"date" not in names:
            self.headers[hdrs.DATE] = rfc822_formatted_time()
        return kept

    def _length(self, value: bytes) -> int:
        text = value.strip()
        if not text.isdigit() or self._missing not in (None, int(text)):
            raise OutputInvalid(f"The app sent the Content-Length {text[:40]!r}.")
        return int(text)

    def _framing(self, piece: ResponsePiece) -> bytes:
        """Return the headers that tell the end of the body, and the empty line after all headers."""
        if self._bodiless:
            # The length is that of the body of a GET. A response with 204 has none.
            known = self._missing if piece.status != 204 else None
            self._missing = None
            return b"\r\n" if known is None else b"content-length: %d\r\n\r\n" % known
        if self._missing is None and piece.last:
            self._missing = len(piece.body)
        if self._missing is not None:
            return b"content-length: %d\r\n\r\n" % self._missing
        if self._to.version < HttpVersion11:
            # The end of the connection is the end of the body.
            self._keeps = False
            return b"\r\n"
        self._chunked_body = True
        return b"transfer-encoding: chunked\r\n\r\n"

    def _as_sent(self, body: bytes, *, last: bool) -> bytes:
        """Return a part of the body as it is sent."""
        if self._bodiless:
            return b""
        if self._chunked_body:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk + b"0\r\n\r\n" if last else chunk
        if self._missing is not None:
            self._missing -= len(body)
            if self._missing < 0 or (last and self._missing):
                raise OutputInvalid("The body of the response is not as long as its Content-Length.")
        return body

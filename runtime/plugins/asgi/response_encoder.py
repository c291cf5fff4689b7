"""Encodes the response of a web app as HTTP/1.1: the status and headers as the app sent them, and the body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus

from aiohttp import hdrs
from aiohttp.helpers import rfc822_formatted_time
from multidict import CIMultiDict

from ....errors import OutputInvalid
from ...front.http.page_isolation import ORIGIN_WIDE
from .incoming_request import HOP_BY_HOP
from .messages import ResponsePiece, check_head

_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}
_BODILESS = (204, 304)
_LENGTH = b"content-length"
_MAX_DIGITS = 18
# `headers` gets these headers of the app, because the gateway may complete or remove them.
_SEEN = frozenset((b"server", b"set-cookie", *(name.lower().encode() for name in ORIGIN_WIDE)))
_CROSS_ORIGIN = _SEEN | {b"vary", b"access-control-allow-origin"}


class ResponseEncoder:
    """Encodes one response. Most header lines keep the bytes that the app sent: aiohttp would change bytes that are not UTF-8."""

    def __init__(
        self, *, head: bool = False, keeps: bool = True, chunks: bool = True, shared: bool = False
    ) -> None:
        """`head` is True for a HEAD request, `chunks` for a caller that uses HTTP/1.1. With `shared`, `headers` gets the app's
        headers of CORS, too, so that the gateway can complete them.
        """
        self.keeps = keeps
        """True if the connection stays open after the response."""
        self.headers: CIMultiDict[str] = CIMultiDict()
        """The gateway's headers, and the app's headers that the gateway may complete or remove."""
        self.status = 0
        self.started = self.complete = False
        self._bodiless, self._may_chunk, self._chunked = head, chunks, False
        self._shared = _CROSS_ORIGIN if shared else _SEEN
        self._lines: list[bytes] = []
        # How many bytes of the body must still follow, by the Content-Length. None without a Content-Length.
        self._missing: int | None = None

    def begin(self, piece: ResponsePiece, own: Callable[[], Mapping[str, str]]) -> None:
        """Read the status and the headers. `own` returns the gateway's headers, which an app may replace.

        Raise OutputInvalid if HTTP does not allow the status or the headers. Before `encode`, the gateway may change
        `headers`.
        """
        if not piece.status or self.status:
            raise OutputInvalid("The pieces of the response have a wrong order.")
        check_head(piece.head)
        if piece.status < 200:
            raise OutputInvalid(f"The app responded with status {piece.status}, which is no final status.")
        names = {self._add(line) for line in piece.head.splitlines(keepends=True)}
        for name, value in own().items():
            if _in_lower_case(name) not in names:
                self.headers[name] = value
        if b"date" not in names:
            self.headers[hdrs.DATE] = rfc822_formatted_time()
        self.status = piece.status

    def _add(self, line: bytes) -> bytes:
        """Add a line of the app's headers, and return the name in it in lower case."""
        name, _, value = line.partition(b":")
        name = name.lower()
        if name == _LENGTH:
            text = value.strip()
            if not text.isdigit() or len(text) > _MAX_DIGITS or self._missing not in (None, int(text)):
                raise OutputInvalid(f"The app sent the Content-Length {text[:40]!r}.")
            self._missing = int(text)
        elif name in self._shared:
            self.headers.add(name.decode(), value.decode("utf-8", "surrogateescape").strip())
        elif name not in HOP_BY_HOP:
            self._lines.append(line)
        return name

    def encode(self, pieces: list[ResponsePiece]) -> bytes:
        """Return the bytes of pieces. Before this, call `begin` with the first piece. Raise OutputInvalid for a wrong body."""
        data = [self._head(pieces[0])] if pieces[0].status else []
        for piece in pieces:
            if self.complete or (piece.status and piece is not pieces[0]):
                raise OutputInvalid("The pieces of the response have a wrong order.")
            data.append(self._body(piece.body, last=piece.last))
            self.complete = piece.last
        self.started = True
        return b"".join(data)

    def _head(self, piece: ResponsePiece) -> bytes:
        framing = self._framing(piece)
        if not self.keeps:
            self.headers[hdrs.CONNECTION] = "close"
        elif not self._may_chunk:
            self.headers[hdrs.CONNECTION] = "keep-alive"
        own = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        lines = own.encode("utf-8", "surrogateescape")
        status = _STATUS_LINES.get(piece.status) or b"HTTP/1.1 %d \r\n" % piece.status
        return b"".join((status, *self._lines, lines, framing))

    def _framing(self, piece: ResponsePiece) -> bytes:
        """Return the headers that tell the end of the body, and the empty line after all headers."""
        if self._bodiless or piece.status in _BODILESS:
            # The Content-Length describes the body that a GET would get. A 204 has no length.
            known = self._missing if piece.status != 204 else None
            self._bodiless, self._missing = True, None
            return b"\r\n" if known is None else b"content-length: %d\r\n\r\n" % known
        if self._missing is None and piece.last:
            self._missing = len(piece.body)
        if self._missing is not None:
            return b"content-length: %d\r\n\r\n" % self._missing
        if not self._may_chunk:
            # HTTP/1.0 has no chunks. Close the connection to mark the end of the body.
            self.keeps = False
            return b"\r\n"
        self._chunked = True
        return b"transfer-encoding: chunked\r\n\r\n"

    def _body(self, body: bytes, *, last: bool) -> bytes:
        """Return a part of the body as it is sent."""
        if self._bodiless:
            return b""
        if self._chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk + b"0\r\n\r\n" if last else chunk
        if self._missing is not None:
            self._missing -= len(body)
            if self._missing < 0 or (last and self._missing):
                raise OutputInvalid("The body of the response is not as long as its Content-Length.")
        return body


@lru_cache(maxsize=64)
def _in_lower_case(name: str) -> bytes:
    return name.lower().encode()

"""Limits the bytes of headers that a connection stores:
the header of a request that is arriving, and the requests that have arrived behind a running request.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.streams import StreamReader
from aiohttp.typedefs import RawHeaders

from ....errors import HeadersTooLarge

MAX_HEADER_BYTES = 64 << 10
DISCARDED_BYTES = 256 << 10
"""If more bytes of an unfinished header arrive, the gateway closes the connection at once."""
MAX_FIELD_BYTES = 8190
"""aiohttp refuses a longer field."""
_END = b"\r\n\r\n"


class HeaderLimit:
    """Counts the bytes of a connection that may belong to headers. It does not count bodies and WebSockets."""

    __slots__ = ("_content", "_past", "_seen", "arrived", "size")

    def __init__(self) -> None:
        self._expect()

    def _expect(self) -> None:
        self.arrived = False
        """True once the whole header has arrived. After the response, it stays true if bytes of the next request may have arrived already.
        """
        self.size = 0
        """The number of counted bytes."""
        self._seen = b""
        self._content: StreamReader | None = None
        # Before `begin`: the number of bytes that have arrived after the header. After `begin`: after the body,
        # negative while bytes of the body are missing. None if the end of the header or body is not known.
        self._past: int | None = 0

    def begin(self, content: StreamReader | None, length: int | None) -> None:
        """Note that a request runs. `content` is its body; None for a WebSocket. `length` is the number of bytes of the
        body; None if it is not known.

        Bytes that arrive after the body belong to later requests, and count.
        """
        self.arrived, self.size, self._content = True, 0, content
        self._past = None if length is None or self._past is None else self._past - length

    @property
    def in_body(self) -> bool:
        """True if a request runs and all bytes that have arrived belong to its body, whose length is known."""
        return self.arrived and self._past is not None and self._past <= 0

    def responded(self) -> None:
        """Note that the response to the running request has been sent. Expect a new header, unless bytes of it may have
        arrived already.
        """
        if self._past == 0:
            self._expect()
        else:
            self._past = None

    def add(self, data: bytes) -> bool:
        """Count bytes that have arrived. Return False if the connection stores more than MAX_HEADER_BYTES of headers."""
        if self.arrived:
            if self._past is not None:
                self._past += len(data)
            if self._content is None or not self._content.is_eof():
                return True
        elif self.size <= MAX_HEADER_BYTES:
            # Skip empty lines before a request, which are not part of its header.
            seen = self._seen + data if self._seen else data.lstrip(b"\r\n")
            end = seen.find(_END)
            if end >= 0:
                self.arrived, self._past = True, len(seen) - end - len(_END)
                return True
            self._seen = seen[1 - len(_END) :]
        self.size += len(data)
        return self.size <= MAX_HEADER_BYTES


def too_large(headers: RawHeaders) -> bool:
    """Return True if the header of a request is too large."""
    # A request with few fields cannot exceed the limit.
    if len(headers) * MAX_FIELD_BYTES <= MAX_HEADER_BYTES:
        return False
    return sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES


def headers_too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The header of the request is larger than {MAX_HEADER_BYTES >> 10} KiB.", remedy="Send less in it."
    )


def check_headers(request: web.Request) -> None:
    """Raise HeadersTooLarge if the header of a request is too large."""
    if too_large(request.raw_headers):
        raise headers_too_large()

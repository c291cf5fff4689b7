"""Limits the bytes of the headers that a connection holds: of a request that arrives, and of requests behind one that runs."""

from __future__ import annotations

from aiohttp import web
from aiohttp.streams import StreamReader
from aiohttp.typedefs import RawHeaders

from ....errors import HeadersTooLarge

MAX_HEADER_BYTES = 64 << 10
DISCARDED_BYTES = 256 << 10
"""After this many, the connection of an unfinished header is closed at once."""
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
        """True once the whole header has arrived. It stays true if the next request may have begun with the bytes of this one."""
        self.size = 0
        """The bytes that count."""
        self._seen = b""
        self._content: StreamReader | None = None
        # The bytes that have arrived past the end of the header, and once the request runs, of its body. None if that end
        # is not known.
        self._past: int | None = 0

    def begin(self, content: StreamReader | None, length: int | None) -> None:
        """A request runs, whose body is `content` and has `length` bytes if that is known. A WebSocket has no content.

        What arrives after the body belongs to the requests behind it.
        """
        self.arrived, self.size, self._content = True, 0, content
        self._past = None if length is None or self._past is None else self._past - length

    @property
    def in_body(self) -> bool:
        """True if a request runs and all bytes that have arrived belong to its body, whose length is known."""
        return self.arrived and self._past is not None and self._past <= 0

    def responded(self) -> None:
        """The response to the running request has been sent."""
        if self._past == 0:
            self._expect()
        else:
            self._past = None

    def add(self, data: bytes) -> bool:
        """Count the bytes that have arrived. Return False if more bytes of headers wait than may."""
        if self.arrived:
            if self._past is not None:
                self._past += len(data)
            if self._content is None or not self._content.is_eof():
                return True
        elif self.size <= MAX_HEADER_BYTES:
            # Empty lines before a request are no header.
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

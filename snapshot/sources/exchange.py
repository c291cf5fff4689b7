"""Sends requests over HTTP/1.1, with h11. Bodies are received directly into the caller's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import h11

from .wire import Wire

# The buffer holds the head of a response and the first bytes of the body, which arrive together with it. The
# rest of the body is received into the caller's memory.
_BUFFER_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Head:
    """A response's status and headers. Names are in lower case. Repeated headers are joined by commas."""

    status: int
    headers: Mapping[str, str]


class StaleError(ConnectionError):
    """The server closed the connection before the first byte of the response."""


class Exchange:
    """Sends requests and receives responses over one wire, one after another.

    Methods raise OSError if the connection fails, and h11.RemoteProtocolError if a response is not valid HTTP.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        # The number of bytes that the last `_receive` put into the buffer.
        self._received = 0
        # Bytes of the body that are received but not read: they came with the head, or belong to a chunked body.
        self._held = self._buffer[:0]
        # The number of bytes of the body that are not read yet, including `_held`; 0 if it is unknown.
        self._left = 0
        # The parser of a body of unknown length (for example chunked), until the body ends. Else None.
        self._parser: h11.Connection | None = None
        self._kept = False

    @property
    def clean(self) -> bool:
        """True if another request can be sent: the last body was read, and the server keeps the connection open."""
        return self._kept and self._parser is None and self._left == 0 and not len(self._held)

    def request(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: Iterable[bytes] = ()
    ) -> Head:
        """Send a request for `target` (path and query), wait for the head of the response, and return it.

        If there is a `body`, `headers` have its Content-Length. Raise StaleError if the server closed the connection before
        any response. The caller may try again on a new connection.
        """
        self._kept, self._held, self._left, self._parser = False, self._buffer[:0], 0, None
        parser = h11.Connection(h11.CLIENT)
        request = parser.send(h11.Request(method=method, target=target, headers=list(headers))) or b""
        try:
            self._wire.send(request)
            # Ignore a closed connection and read the response: a server may refuse a request before it has received the body.
            with suppress(ConnectionResetError, BrokenPipeError):
                for block in body:
                    self._wire.send(parser.send(h11.Data(data=block)) or b"")
                parser.send(h11.EndOfMessage())
            self._receive(parser)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise StaleError("the connection was reset") from error
        if self._received == 0:
            raise StaleError("the connection was closed")
        while (event := parser.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
            if event is h11.NEED_DATA:
                self._receive(parser)
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError("no response")
        return self._start(parser, event, method)

    def read_into(self, view: memoryview, limit: int) -> int:
        """Read at most `limit` (> 0) bytes of the body into `view`. Return their number: 0 at the body's end.

        Raise ConnectionError if the connection ends before the body.
        """
        if self._parser is not None and not len(self._held):
            self._next_piece(self._parser)
        if held := min(len(self._held), limit):
            view[:held] = self._held[:held]
            self._held = self._held[held:]
            self._left = max(0, self._left - held)
            return held
        if self._left == 0:
            return 0
        count = self._wire.receive(view, min(limit, self._left), gather=True)
        if count == 0:
            raise ConnectionError("the connection was closed")
        self._left -= count
        return count

    def _start(self, parser: h11.Connection, response: h11.Response, method: str) -> Head:
        headers: dict[str, str] = {}
        for raw_name, raw_value in response.headers:
            name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self._kept = parser.our_state is h11.DONE
        sized = "content-length" in headers and "transfer-encoding" not in headers
        # The response to HEAD has the length of a body, and no body.
        if sized and method != "HEAD":
            self._left = int(headers["content-length"])
            ahead = len(parser.trailing_data[0])
            # The first bytes of the body came with the last `_receive`, which completed the head.
            self._held = self._buffer[self._received - ahead : self._received]
            # If the server sent more bytes than the body has, the connection must not be used again.
            if ahead > self._left:
                self._held, self._kept = self._held[: self._left], False
        else:
            self._parser = parser
        return Head(response.status_code, headers)

    def _next_piece(self, parser: h11.Connection) -> None:
        while (event := parser.next_event()) is h11.NEED_DATA:
            self._receive(parser)
        if isinstance(event, h11.Data):
            self._held = memoryview(event.data)
        else:
            # The event is EndOfMessage: the body has ended.
            self._parser = None
            self._kept = self._kept and not parser.trailing_data[0] and not parser.trailing_data[1]

    def _receive(self, parser: h11.Connection) -> None:
        self._received = self._wire.receive(self._buffer)
        # If the server has closed the connection inside a head or a chunked body, h11 raises RemoteProtocolError.
        parser.receive_data(bytes(self._buffer[: self._received]))

"""GET requests over one HTTP/1.1 connection. h11 writes requests and parses heads; bodies go straight into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import h11

from .wire import Wire

# Holds a head and the body bytes received with it. The rest of a body is received into the caller's memory.
_BUFFER_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Head:
    """A response's status and headers. Names are in lower case; repeated headers are joined by commas."""

    status: int
    headers: Mapping[str, str]


class StaleError(ConnectionError):
    """The server closed the connection before the first byte of the response."""


class Exchange:
    """Requests and responses over one wire. Methods raise OSError and h11.RemoteProtocolError."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        # Bytes that the last receive put into the buffer.
        self._received = 0
        # Body bytes to return before receiving more: received with the head, or decoded from a chunked body.
        self._held = self._buffer[:0]
        # Bytes left of a body of known length, including those held.
        self._left = 0
        # The parser of a body of unknown length.
        self._parser: h11.Connection | None = None
        self._kept = False

    @property
    def clean(self) -> bool:
        """Whether the last body was read to its end and the server keeps the connection open."""
        return self._kept and self._parser is None and self._left == 0 and not len(self._held)

    def get(self, target: str, headers: Sequence[tuple[str, str]]) -> Head:
        """Send a GET of `target` (path and query), and wait for the response's head."""
        self._kept, self._held, self._left, self._parser = False, self._buffer[:0], 0, None
        parser = h11.Connection(h11.CLIENT)
        request = parser.send(h11.Request(method="GET", target=target, headers=list(headers))) or b""
        parser.send(h11.EndOfMessage())
        try:
            self._wire.send(request)
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
        return self._start(parser, event)

    def read_into(self, view: memoryview, limit: int) -> int:
        """Read at most `limit` (> 0) bytes of the body; 0 is its end. Raises ConnectionError if it ends early."""
        if self._parser is not None and not len(self._held):
            self._next_piece(self._parser)
        if held := min(len(self._held), limit):
            view[:held] = self._held[:held]
            self._held = self._held[held:]
            self._left = max(0, self._left - held)
            return held
        if self._left == 0:
            return 0
        count = self._wire.receive(view, min(limit, self._left))
        if count == 0:
            raise ConnectionError("the connection was closed")
        self._left -= count
        return count

    def read_rest(self, limit: int) -> bytes:
        """Return the rest of the body, at most `limit` bytes."""
        rest, done = memoryview(bytearray(limit)), 0
        while done < limit and (count := self.read_into(rest[done:], limit - done)):
            done += count
        return bytes(rest[:done])

    def _start(self, parser: h11.Connection, response: h11.Response) -> Head:
        headers: dict[str, str] = {}
        for raw_name, raw_value in response.headers:
            name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        self._kept = parser.our_state is not h11.MUST_CLOSE
        if "content-length" in headers and "transfer-encoding" not in headers:
            self._left = int(headers["content-length"])
            ahead = len(parser.trailing_data[0])
            # All bytes ahead came with the last receive, since the head was incomplete before it.
            self._held = self._buffer[self._received - ahead : self._received]
            # More bytes than the body has: the connection cannot be trusted further.
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
            # EndOfMessage.
            self._parser = None
            self._kept = self._kept and not parser.trailing_data[0] and not parser.trailing_data[1]

    def _receive(self, parser: h11.Connection) -> None:
        self._received = self._wire.receive(self._buffer)
        # No bytes mean that the server closed, which h11 refuses inside a head or a chunked body.
        parser.receive_data(bytes(self._buffer[: self._received]))

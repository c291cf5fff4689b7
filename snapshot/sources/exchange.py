"""HTTP/1.1 on a wire: one GET after another. h11 writes requests and reads heads; bodies go straight into memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import h11

from .wire import Wire

_BUFFER_BYTES = (
    16 << 10
)  # a head with some of its body; what is left of the body is received where it belongs


@dataclass(frozen=True, slots=True)
class Head:
    """A response's status and headers; their names in lower case, repeated ones joined by commas."""

    status: int
    headers: Mapping[str, str]


class StaleError(ConnectionError):
    """The peer ended the connection before a byte of the response."""


class Exchange:
    """The requests on one wire. OSError and h11.RemoteProtocolError are the caller's to translate."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._received = 0  # bytes in the buffer, by the last receive
        self._held = self._buffer[
            :0
        ]  # body bytes that came with the head, or in a piece of a body without length
        self._left = 0  # of a body of known length, with those that are held
        self._parser: h11.Connection | None = None  # of a body without length
        self._kept = False

    @property
    def clean(self) -> bool:
        """Whether the last body was read to its end and the peer keeps the connection."""
        return self._kept and self._parser is None and self._left == 0 and not len(self._held)

    def ask(self, target: str, headers: Sequence[tuple[str, str]]) -> Head:
        """GET `target` (path and query); waits for the response's head."""
        self._kept, self._held, self._left, self._parser = False, self._buffer[:0], 0, None
        parser = h11.Connection(h11.CLIENT)
        request = parser.send(h11.Request(method="GET", target=target, headers=list(headers))) or b""
        parser.send(h11.EndOfMessage())
        try:
            self._wire.send(request)
            self._receive()
        except (ConnectionResetError, BrokenPipeError) as error:
            raise StaleError("the connection was reset") from error
        if self._received == 0:
            raise StaleError("the connection was closed")
        self._feed(parser)
        while (event := parser.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
            if event is h11.NEED_DATA:
                self._receive()
                self._feed(parser)
        if not isinstance(event, h11.Response):
            raise h11.RemoteProtocolError("no response")
        return self._start(parser, event)

    def read_into(self, view: memoryview, limit: int) -> int:
        """The body's next bytes, at most `limit` (> 0); 0 at its end. ConnectionError if it is cut short."""
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
        """The rest of the body, or its first `limit` bytes."""
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
            # All that is ahead came with the last receive: the head was not complete before it.
            self._held = self._buffer[self._received - ahead : self._received]
            if ahead > self._left:
                self._held, self._kept = self._held[: self._left], False  # bytes that nobody asked for
        else:
            self._parser = parser
        return Head(response.status_code, headers)

    def _next_piece(self, parser: h11.Connection) -> None:
        while (event := parser.next_event()) is h11.NEED_DATA:
            self._receive()
            self._feed(parser)
        if isinstance(event, h11.Data):
            self._held = memoryview(event.data)
        else:
            self._parser = None  # EndOfMessage
            self._kept = self._kept and not parser.trailing_data[0] and not parser.trailing_data[1]

    def _receive(self) -> None:
        self._received = self._wire.receive(self._buffer)

    def _feed(self, parser: h11.Connection) -> None:
        # Nothing received is the peer's end, which h11 refuses in the middle of a head or of a chunked body.
        parser.receive_data(bytes(self._buffer[: self._received]))

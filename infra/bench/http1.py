"""HTTP/1.1 as a load generator needs it: one request's bytes, and a keep-alive connection that costs little.

Only the status, the length of the body and (where asked) some headers are looked at. No pipelining, no HEAD.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Request:
    """A request that a generator sends repeatedly, and the properties of a right answer."""

    url: str
    method: str = "POST"
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    expect: bytes | None = None  # the body of a right answer; JSON may be spaced otherwise
    capture: tuple[str, ...] = ()  # response headers to bring back

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def encode(self) -> bytes:
        """The request's bytes on the wire."""
        parts = urlsplit(self.url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        lines = [f"{self.method} {path} HTTP/1.1", f"Host: {parts.netloc}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if self.body or self.method in {"POST", "PUT", "PATCH"}:
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode() + self.body


@dataclass(frozen=True, slots=True)
class Answer:
    """One response, whole."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str:
        """The value of one header, empty where it is absent."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return ""


def unchunk(data: bytes) -> bytes | None:
    """The body of a chunked message, or None while some of it is missing."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            return None
        size = int(data[at:end].split(b";")[0], 16)
        start = end + 2
        if len(data) < start + size + 2:
            return None
        if size == 0:
            return b"".join(parts)
        parts.append(data[start : start + size])
        at = start + size + 2


_UNTIL_CLOSE = -1
_CHUNKED = -2


def _body_length(lowered: bytes, status: int) -> int:
    """How long the body is: a number of bytes, or one of the two marks above."""
    at = lowered.find(b"\r\ncontent-length:")
    if at >= 0:
        end = lowered.find(b"\r\n", at + 17)
        return int(lowered[at + 17 : end if end >= 0 else None])
    if b"\r\ntransfer-encoding: chunked" in lowered:
        return _CHUNKED
    return 0 if status in {204, 304} else _UNTIL_CLOSE


class Connection(asyncio.Protocol):
    """One keep-alive connection: tells its owner of each whole answer, and of its own end."""

    def __init__(
        self, on_answer: Callable[[Connection, Answer], None], on_lost: Callable[[Connection], None]
    ) -> None:
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._head = b""
        self._status = 0
        self._length = 0
        self._last = False  # the server said that it closes after this answer

    @property
    def alive(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one in all but inheritance

    def send(self, wire: bytes) -> None:
        assert self._transport is not None
        self._transport.write(wire)

    def close(self) -> None:
        """End the connection without a report to the owner, who has asked for it."""
        self._last = True
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._head and not self._read_head():
            return
        body = self._whole_body()
        if body is not None:
            self._finish(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._head and self._length == _UNTIL_CLOSE and exc is None:
            self._last = True
            self._finish(bytes(self._buffer))
        elif self._head or not self._last:
            self._on_lost(self)

    def _read_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        self._head = bytes(self._buffer[:end])
        self._status = int(self._head[9:12])
        lowered = self._head.lower()
        self._length = _body_length(lowered, self._status)
        self._last = b"\r\nconnection: close" in lowered
        del self._buffer[: end + 4]
        return True

    def _whole_body(self) -> bytes | None:
        if self._length >= 0:
            return bytes(self._buffer) if len(self._buffer) >= self._length else None
        if self._length == _CHUNKED and self._buffer.endswith(b"0\r\n\r\n"):
            return unchunk(bytes(self._buffer))
        return None

    def _finish(self, body: bytes) -> None:
        answer = Answer(self._status, self._head, body)
        self._head = b""
        self._buffer.clear()
        if self._last:
            self.close()
        self._on_answer(self, answer)

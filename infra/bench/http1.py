"""HTTP/1.1 as a load generator needs it: a request as bytes, and a keep-alive connection that uses little CPU time.

A response must have a Content-Length or be chunked. There is no pipelining.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

_CHUNKED = -1


@dataclass(frozen=True)
class Request:
    """A POST that a generator sends repeatedly, and the properties of a right answer."""

    url: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    expect: bytes | None = None
    """The body of a right answer. The spaces of JSON may differ."""
    capture: str = ""
    """A response header to keep."""

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "127.0.0.1", parts.port or 80

    def encode(self) -> bytes:
        """Return the request as bytes."""
        parts = urlsplit(self.url)
        headers = {"Host": parts.netloc, **self.headers, "Content-Length": len(self.body)}
        lines = [f"POST {parts.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join([*lines, "", ""]).encode() + self.body


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole response."""

    status: int
    head: bytes
    body: bytes

    def header(self, name: str) -> str:
        """Return the value of a header, empty if it is absent."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode("latin-1")
        return ""


class Connection(asyncio.Protocol):
    """One keep-alive connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._on_answer: Callable[[Answer | None], None] | None = None
        self._buffer = bytearray()
        self._head = b""
        self._length = 0

    def send(self, wire: bytes, on_answer: Callable[[Answer | None], None]) -> None:
        """Send a request, and call `on_answer` with its answer, or with None if the connection is lost."""
        self._on_answer = on_answer
        if self._transport is None:
            self._finish(None)
        else:
            self._transport.write(wire)

    async def ask(self, wire: bytes) -> Answer | None:
        """Send a request. Return its answer, or None if the connection is lost."""
        answered: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.send(wire, answered.set_result)
        return await answered

    def close(self) -> None:
        self._on_answer = None
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The transport of uvloop does not inherit from asyncio.Transport.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._finish(None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._head:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = bytes(self._buffer[:end])
            self._length = _body_length(self._head.lower())
            del self._buffer[: end + 4]
        body = bytes(self._buffer) if len(self._buffer) >= self._length else None
        if self._length == _CHUNKED:
            body = _unchunk(self._buffer) if self._buffer.endswith(b"0\r\n\r\n") else None
        if body is not None:
            answer = Answer(int(self._head[9:12]), self._head, body)
            self._head = b""
            self._buffer.clear()
            self._finish(answer)

    def _finish(self, answer: Answer | None) -> None:
        on_answer, self._on_answer = self._on_answer, None
        if on_answer is not None:
            on_answer(answer)


async def connect(request: Request) -> Connection:
    """Return a new connection to the server of a request."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, *request.address)
    return connection


def _body_length(head: bytes) -> int:
    at = head.find(b"\r\ncontent-length:")
    if at < 0:
        return _CHUNKED
    end = head.find(b"\r\n", at + 17)
    return int(head[at + 17 : end if end >= 0 else None])


def _unchunk(data: bytearray) -> bytes | None:
    """Return the body of a chunked message, or None if a part of it is missing."""
    parts: list[bytes] = []
    at = 0
    while (end := data.find(b"\r\n", at)) >= 0:
        size, start = int(data[at:end].split(b";")[0], 16), end + 2
        if size == 0:
            return b"".join(parts)
        parts.append(bytes(data[start : start + size]))
        at = start + size + 2
    return None

"""Keeps the last lines that a function's processes printed, and passes new lines to followers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

KEPT_LINES = 2_000
MAX_LINE_BYTES = 16 << 10
RECEIVE_BYTES = 64 << 10
FOLLOWER_LINES = 1_000


class LogLine(NamedTuple):
    """A line of a function's log.

    `at` is when it was received, as Unix time in seconds. `source` is the name of the worker or zygote that
    printed it, or `gateway` or `deploy`.
    """

    at: float
    source: str
    text: str


class LogBook:
    """The log of one function: its last `kept` lines, and a queue of new lines for each follower."""

    def __init__(self, kept: int = KEPT_LINES) -> None:
        self._lines: deque[LogLine] = deque(maxlen=kept)
        self._followers: set[asyncio.Queue[LogLine]] = set()

    def write(self, source: str, text: str) -> None:
        """Add a line. A follower whose queue is full, because it reads too slowly, misses this line."""
        line = LogLine(time.time(), source, text)
        self._lines.append(line)
        for follower in self._followers:
            with contextlib.suppress(asyncio.QueueFull):
                follower.put_nowait(line)

    def tail(self, count: int) -> list[LogLine]:
        return list(self._lines)[-count:] if count > 0 else []

    async def follow(self, count: int) -> AsyncIterator[LogLine]:
        """Yield the last `count` lines, then each new line, without end."""
        queue: asyncio.Queue[LogLine] = asyncio.Queue(FOLLOWER_LINES)
        self._followers.add(queue)
        try:
            for line in self.tail(count):
                yield line
            while True:
                yield await queue.get()
        finally:
            self._followers.discard(queue)


class LogStream:
    """Reads the output of the process `source` from a socket until its end, and writes the lines to a log."""

    def __init__(self, sock: socket.socket, book: LogBook, source: str) -> None:
        sock.setblocking(False)
        self._sock, self._book, self._source = sock, book, source
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)

    @property
    def alive(self) -> bool:
        return self._sock.fileno() >= 0

    def close(self) -> None:
        if not self.alive:
            return
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if self._rest:
            self._write(self._rest)
            self._rest = b""

    def _readable(self) -> None:
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._write(line)
        # A process that prints no newline must not fill the gateway's memory.
        if len(self._rest) > MAX_LINE_BYTES:
            self._write(self._rest)
            self._rest = b""

    def _write(self, line: bytes) -> None:
        for start in range(0, len(line) or 1, MAX_LINE_BYTES):
            piece = line[start : start + MAX_LINE_BYTES]
            self._book.write(self._source, piece.decode("utf-8", "replace").rstrip("\r"))

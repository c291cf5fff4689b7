"""Data of a connection that may have many small parts: requests, the chunks of a body, the frames of a WebSocket.

aiohttp parses such data in turns, so that the parts of one connection do not delay other connections. Requests behind a
running request wait for its response, so that aiohttp never stores many requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from aiohttp.streams import StreamReader

from .header_limit import MAX_HEADER_BYTES, HeaderLimit

SLICE_BYTES, PARSING_S = 2 << 10, 0.5e-3
"""In one turn, aiohttp gets slices of this size until this time has passed."""
HEAD_SLICE_BYTES = 256
"""The size of the only slice in a turn while no request runs. Such a slice has fewer than 32 requests. With 32
requests, aiohttp would pause and resume the transport itself.
"""


class ParsingConnection(Protocol):
    """A connection, as `UnparsedData` sees it."""

    @property
    def transport(self) -> asyncio.Transport | None: ...

    def parse(self, data: bytes) -> None:
        """Give data to aiohttp."""


class UnparsedData:
    """The bytes that have arrived and that aiohttp gets in later turns. While many bytes wait, the transport is paused."""

    __slots__ = ("_data", "_header", "_in_turns", "_take_later", "body", "full", "is_socket")

    def __init__(self, take_later: Callable[[Callable[[], None]], None], header: HeaderLimit) -> None:
        """`take_later` calls its argument in a later turn of the event loop."""
        self._take_later, self._header = take_later, header
        self._data, self._in_turns = b"", False
        self.body: StreamReader | None = None
        """The body of the running request. Bytes that arrive behind the body wait for the response."""
        self.is_socket = False
        """True for a WebSocket whose handshake has been answered."""
        self.full = False
        """True while aiohttp parses nothing, because its reader has too much unread data."""

    def _waits(self) -> bool:
        return self.full or (self.body is not None and self.body.is_eof())

    def takes(self, data: bytes) -> bool:
        """Return True if `data` must be passed to `add`. Otherwise, aiohttp may parse it now."""
        if self._data or self._waits():
            return True
        return len(data) > SLICE_BYTES and not self._header.in_body

    def add(self, data: bytes, connection: ParsingConnection) -> None:
        self._data += data
        self.go_on(connection)

    def go_on(self, connection: ParsingConnection) -> None:
        """Parse the data in a later turn, unless it must wait for the response or for aiohttp's reader. Pause the
        transport if too much data waits, else resume it.
        """
        transport = connection.transport
        if transport is None:
            return
        waits = self._waits()
        if self._data and not waits and not self._in_turns:
            self._in_turns = True
            self._take_later(partial(self._take_turn, connection))
        # While data waits for a response, read up to MAX_HEADER_BYTES, so that the transport notices if the client
        # disconnects.
        if len(self._data) > (MAX_HEADER_BYTES if waits else 0) or self._header.size > MAX_HEADER_BYTES:
            transport.pause_reading()
        elif not self.full:
            transport.resume_reading()

    def _take_turn(self, connection: ParsingConnection) -> None:
        self._in_turns = False
        start, until_s = 0, time.perf_counter() + PARSING_S
        heads = self.body is None and not self.is_socket
        size = HEAD_SLICE_BYTES if heads else len(self._data) if self._header.in_body else SLICE_BYTES
        while start < len(self._data) and connection.transport is not None and not self._waits():
            data = self._data[start : start + size]
            start += size
            try:
                connection.parse(data)
            except Exception:
                # Close the connection, as uvloop does if a protocol raises an error.
                if connection.transport is not None:
                    connection.transport.abort()
                raise
            if heads or time.perf_counter() > until_s:
                break
        self._data = self._data[start:]
        self.go_on(connection)

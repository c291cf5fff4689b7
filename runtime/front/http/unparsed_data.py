"""Data of a connection that may have many small parts: the chunks of a body, the frames of a WebSocket.

aiohttp parses such data in turns, so that the parts of one connection do not delay other connections.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

from ..listening.reading_turns import ReadingTurns
from .header_limit import HeaderLimit

SLICE_BYTES, PARSING_S = 2 << 10, 0.5e-3
"""In one turn, aiohttp gets slices of this size for this time."""


class ParsingConnection(Protocol):
    """A connection, as `UnparsedData` sees it."""

    @property
    def transport(self) -> asyncio.Transport | None: ...

    def parse(self, data: bytes) -> None:
        """Give data to aiohttp."""


class UnparsedData:
    """The bytes that have arrived and that aiohttp gets in later turns. While there are any, the transport does not read."""

    __slots__ = ("_data", "_header", "_in_turns", "_turns", "full", "waits")

    def __init__(self, turns: ReadingTurns, header: HeaderLimit) -> None:
        self._turns, self._header = turns, header
        self._data, self._in_turns = b"", False
        self.full = False
        """True while aiohttp parses no more, because too much waits for its reader."""
        self.waits = False
        """True while the requests behind the running one wait at their client."""

    def takes(self, data: bytes) -> bool:
        """Return True if data that has arrived must be added."""
        return bool(self._data) or (len(data) > SLICE_BYTES and not self._header.in_body)

    def add(self, data: bytes, connection: ParsingConnection) -> None:
        self._data += data
        self.go_on(connection)

    def go_on(self, connection: ParsingConnection) -> None:
        """Parse the data in a later turn. Without data, let the transport read, unless something else has to come first."""
        transport = connection.transport
        if transport is None:
            return
        if self._data:
            transport.pause_reading()
            if not (self._in_turns or self.full):
                self._in_turns = True
                self._turns.add(partial(self._take_turn, connection))
        elif not (self.waits or self.full):
            transport.resume_reading()

    def _take_turn(self, connection: ParsingConnection) -> None:
        self._in_turns = False
        if connection.transport is None:
            return
        start, until_s = 0, time.perf_counter() + PARSING_S
        size = len(self._data) if self._header.in_body else SLICE_BYTES
        while start < len(self._data) and not self.full and not (start and time.perf_counter() > until_s):
            connection.parse(self._data[start : start + size])
            start += size
        self._data = self._data[start:]
        self.go_on(connection)

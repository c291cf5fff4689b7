"""Sends an output as binary messages of the media type application/vnd.amazon.eventstream.

A message consists of its length, the length of its headers, the CRC-32 of these two numbers, the headers, the payload
and the CRC-32 of all bytes before. Each number has 4 bytes, the highest byte first.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import orjson
from aiohttp import web

from ....handlers.codec import BYTES_TYPE
from ...calls.serving.invocation import Invocation
from ...front.http.event_stream import STREAM_HEADERS, EventStream
from ...front.http.responses import made

EVENT_STREAM_TYPE = "application/vnd.amazon.eventstream"
MAX_PAYLOAD_BYTES = 1 << 20
"""A longer payload is split into several messages, because clients refuse large messages. botocore accepts 16 MiB, and
AWS's own service sends at most 1 MiB.
"""
# In a header of a message, this number says that the value is text.
_TEXT = 7


class MessageStream(EventStream):
    """The response to an invocation as an event stream of AWS. The HTTP headers are sent before the first message."""

    part: ClassVar[str]
    """The event type of the messages that carry bytes of the output."""

    def __init__(self, request: web.Request, invocation: Invocation, headers: Mapping[str, str]) -> None:
        super().__init__(
            request,
            invocation,
            {**STREAM_HEADERS, **headers, "Content-Type": EVENT_STREAM_TYPE},
            heartbeat=b"",
        )

    async def send(self, payload: bytes) -> None:
        """Send a complete output."""
        await self._write(await made(self._request, len(payload), partial(self._parts, payload)))

    def _encode(self, pieces: list[bytes], first: int) -> bytes:
        return b"".join(self._parts(payload_of(piece)) for piece in pieces)

    def _parts(self, payload: bytes) -> bytes:
        starts = range(0, len(payload), MAX_PAYLOAD_BYTES)
        named = {":message-type": "event", ":event-type": self.part, ":content-type": BYTES_TYPE}
        return b"".join(message(named, payload[start : start + MAX_PAYLOAD_BYTES]) for start in starts)


def payload_of(piece: bytes) -> bytes:
    """Return a piece of the output as bytes: a string without its JSON quotes, any other value as a line of JSON."""
    value = orjson.loads(piece) if piece.startswith(b'"') else None
    return value.encode() if isinstance(value, str) else piece + b"\n"


def message(named: Mapping[str, str], payload: bytes) -> bytes:
    """Return a message with the headers `named` and with `payload`."""
    headers = b"".join(_header(name, value) for name, value in named.items())
    # The two lengths and the two checksums have 16 bytes together.
    prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    found = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return found + struct.pack(">I", zlib.crc32(found))


def _header(name: str, value: str) -> bytes:
    return (
        struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", _TEXT, len(value)) + value.encode()
    )

"""Sends an output as AWS Lambda's response stream: binary messages of the media type application/vnd.amazon.eventstream.

A message consists of its length, the length of its headers, the CRC-32 of these two numbers, the headers, the payload
and the CRC-32 of all bytes before. Each number has 4 bytes, the highest byte first. `PayloadChunk` messages carry the
bytes of the output. The last message, `InvokeComplete`, carries a JSON object.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping

import orjson
from aiohttp import web

from ....errors import PilotflameError
from ....handlers.codec import BYTES_TYPE, JSON_TYPE
from ...http.event_stream import STREAM_HEADERS, EventStream
from ...serving.invocation import Invocation
from .failures import function_error

EVENT_STREAM_TYPE = "application/vnd.amazon.eventstream"
MAX_PAYLOAD_BYTES = 1 << 20
"""Clients refuse larger messages: botocore allows 16 MiB, and AWS's own service sends at most 1 MiB."""
# In a header of a message, this number says that the value is text.
_TEXT = 7


class ResponseStream(EventStream):
    """The response to an invocation as an event stream of AWS. The HTTP headers are sent before the first message."""

    def __init__(self, request: web.Request, invocation: Invocation, headers: Mapping[str, str]) -> None:
        super().__init__(
            request,
            invocation,
            {**STREAM_HEADERS, **headers, "Content-Type": EVENT_STREAM_TYPE},
            heartbeat=b"",
        )

    async def send(self, payload: bytes) -> None:
        """Send a complete output."""
        await self._write(_chunks(payload))

    async def complete(
        self, error: PilotflameError | None, log: str, *, private: bool = False
    ) -> web.StreamResponse:
        """Send the last message, with the function's error if it failed. `private` adds the stack to the error."""
        found: dict[str, object] = {"LogResult": log} if log else {}
        if error is not None:
            failure = function_error(error, self._invocation.id, private=private)
            found |= {"ErrorCode": failure["errorType"], "ErrorDetails": orjson.dumps(failure).decode()}
        response = await self._write(_message("InvokeComplete", JSON_TYPE, orjson.dumps(found)))
        await response.write_eof()
        return response

    def _encode(self, pieces: list[bytes], first: int) -> bytes:
        return b"".join(_chunks(_payload(piece)) for piece in pieces)


def _payload(piece: bytes) -> bytes:
    """Return a piece of the output as bytes: a string without its JSON quotes, any other value as a line of JSON."""
    value = orjson.loads(piece) if piece.startswith(b'"') else None
    return value.encode() if isinstance(value, str) else piece + b"\n"


def _chunks(payload: bytes) -> bytes:
    starts = range(0, len(payload), MAX_PAYLOAD_BYTES)
    parts = (payload[start : start + MAX_PAYLOAD_BYTES] for start in starts)
    return b"".join(_message("PayloadChunk", BYTES_TYPE, part) for part in parts)


def _message(event: str, content_type: str, payload: bytes) -> bytes:
    named = {":message-type": "event", ":event-type": event, ":content-type": content_type}
    headers = b"".join(_header(name, value) for name, value in named.items())
    # The two lengths and the two checksums have 16 bytes.
    prelude = struct.pack(">II", 16 + len(headers) + len(payload), len(headers))
    message = prelude + struct.pack(">I", zlib.crc32(prelude)) + headers + payload
    return message + struct.pack(">I", zlib.crc32(message))


def _header(name: str, value: str) -> bytes:
    return (
        struct.pack(">B", len(name)) + name.encode() + struct.pack(">BH", _TEXT, len(value)) + value.encode()
    )

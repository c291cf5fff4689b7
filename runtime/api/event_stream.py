"""The event stream: a streamed answer as server-sent events, `output` for each piece, then `completed` or `error`."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

import orjson
from aiohttp import web

from ...errors import PilotflameError
from ..serving.invocation import Invocation, Stream
from .responses import EVENT_STREAM_TYPE, HEARTBEAT_S, event

# How long after the deadline the last event may take to leave: then a reader that does not read is hung up on.
LAST_WORD_S = 2.0
# The kernel, too, forgets what the reader has not taken.
NO_LINGER = struct.pack("ii", 1, 0)


class EventStream:
    """One streamed answer on its way to its reader. Its head is sent with the first piece, or with the first heartbeat."""

    def __init__(
        self, request: web.Request, invocation: Invocation, headers: Callable[[Invocation], dict[str, str]]
    ) -> None:
        self.response: web.StreamResponse | None = None
        self._request = request
        self._invocation = invocation
        self._headers = headers
        self._number = 0

    async def send_pieces(self, stream: Stream) -> None:
        """All of them, as they come. What is there goes out in one write, and is granted again once it has left."""
        while pieces := await self._next(stream):
            first = self._number + 1
            self._number += len(pieces)
            await self._write(
                b"".join([event("output", piece, number) for number, piece in enumerate(pieces, first)])
            )
            stream.consumed(len(pieces))

    async def end(self, error: PilotflameError | None) -> web.StreamResponse:
        """The last event. It says how the stream ended, since the status is long gone."""
        name, data = ("completed", b"{}") if error is None else ("error", orjson.dumps(error.to_wire()))
        await self._write(event(name, data, self._number + 1))
        response = await self._opened()
        await response.write_eof()
        return response

    def hang_up(self) -> None:
        """Closes the connection with what it still holds: an orderly end would wait for the reader, too."""
        transport = self._request.transport
        if transport is not None:
            if (sock := transport.get_extra_info("socket")) is not None and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            transport.abort()

    async def _next(self, stream: Stream) -> list[bytes]:
        while not stream.ready:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    return await stream.take()
            except TimeoutError:
                await self._write(b": waiting\n\n")
        return await stream.take()

    async def _write(self, data: bytes) -> None:
        await (self.response or await self._opened()).write(data)

    async def _opened(self) -> web.StreamResponse:
        """Sends the head. Its Server-Timing ends where the first piece left."""
        if self.response is None:
            told = {"Content-Type": EVENT_STREAM_TYPE, "Cache-Control": "no-store"}
            self.response = web.StreamResponse(headers=self._headers(self._invocation) | told)
            await self.response.prepare(self._request)
        return self.response

"""Defines the input that a caller sends in pieces while its invocation runs."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..link.stream_credit import Credit


class SendPiece(Protocol):
    def __call__(self, piece: bytes, *, last: bool) -> None: ...


class InputStream:
    """The pieces of an input, which one task sends. A piece is sent once the handler's credit allows it, and is not stored here.

    No piece is sent before the handler asks for the first piece, so that the invocation may still run on another worker.
    """

    def __init__(self) -> None:
        self._credit = Credit()
        self._asked = asyncio.Event()
        self._closed = False
        self._send: SendPiece | None = None

    def connect(self, send: SendPiece) -> None:
        """Set `send`, which sends a piece to the worker of the invocation."""
        self._send = send

    async def wait_asked(self) -> bool:
        """Wait until the handler wants input. Return False if the invocation has ended."""
        await self._asked.wait()
        return not self._closed

    async def put(self, piece: bytes, *, last: bool = False) -> bool:
        """Wait until the handler's credit allows it, and send a piece of at most PIECE_BYTES (`runtime/calls/link/stream_credit.py`).

        Return False if the invocation has ended.
        """
        await self._asked.wait()
        if not await self._credit.spend_async(len(piece)) or self._send is None:
            return False
        self._send(piece, last=last)
        return True

    def grant(self, count: int) -> None:
        """Record that the handler has read `count` pieces. The first call, with 0, asks for the first piece."""
        self._credit.grant(count)
        self._asked.set()

    def close(self) -> None:
        """End the waits of the sender, because the invocation has ended."""
        self._closed = True
        self._credit.close()
        self._asked.set()

"""Exchanges pieces of input and output with the caller of a running invocation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .connection import Link
from .frames import FrameKind
from .stream_credit import Credit, ReadPieces


class WorkerExchange:
    """The worker's end of the exchange of pieces with a caller (`handlers.contract.PieceExchange`). Use it on the event loop's thread.

    Most calls send one short output and receive no input. To save time, the credit and the event are made at their first use.
    """

    __slots__ = (
        "_asked", "_changed", "_channel", "_credit", "_ended", "_link", "_pieces", "_read", "follows", "gone", "on_gone",
    )  # fmt: skip

    def __init__(self, link: Link, channel: int, *, follows: bool) -> None:
        """`follows` is True if the caller sends the input in pieces. The first `receive` asks the gateway for them."""
        self._link, self._channel, self.follows = link, channel, follows
        self._ended, self._asked, self.gone = not follows, False, False
        self.on_gone: Callable[[], None] | None = None
        self._pieces: deque[bytes] = deque()
        self._credit: Credit | None = None
        self._read: ReadPieces | None = None
        self._changed: asyncio.Event | None = None

    async def send(self, piece: bytes) -> bool:
        if not await self._spend(piece):
            return False
        self._link.send(FrameKind.CHUNK, self._channel, b"", piece)
        return True

    async def _spend(self, piece: bytes) -> bool:
        """Wait until a piece may be sent to the gateway. Return False if the caller has gone."""
        if self.gone:
            return False
        if self._credit is None:
            self._credit = Credit()
        return await self._credit.spend_async(len(piece))

    async def receive(self) -> bytes | None:
        if not self._asked and not self._ended:
            self._asked = True
            self._report(0)
        while not self._pieces:
            if self._ended or self.gone:
                return None
            await self._change()
        piece = self._pieces.popleft()
        self._read = self._read or ReadPieces()
        if not self._ended and (count := self._read.add(len(piece))):
            self._report(count)
        return piece

    # -- what the gateway reports

    def put(self, piece: bytes, *, last: bool) -> None:
        """Add a piece of the input. The gateway limits the number of unread pieces."""
        if piece:
            self._pieces.append(piece)
        self._ended = last
        self._wake()

    def grant(self, count: int) -> None:
        """Record that the caller has received `count` pieces of the output."""
        if self._credit is not None:
            self._credit.grant(count)

    def close(self) -> None:
        """End all waits, because the caller has gone."""
        self.gone = True
        if self._credit is not None:
            self._credit.close()
        if self.on_gone is not None:
            self.on_gone()
        self._wake()

    def _report(self, count: int) -> None:
        self._link.send_json(FrameKind.READ, self._channel, {"count": count})

    async def _change(self) -> None:
        """Wait for the next call of `put` or `close`. Several tasks may wait."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

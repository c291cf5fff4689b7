"""Limits the bytes of request bodies that have arrived only in part or wait to be unpacked.

The owners of API keys share the limit, and take turns in the threads that unpack and pack bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from aiohttp import web

from ....errors import Overloaded
from ...ground.access.fair_share import SharedRoom
from ...ground.access.fair_threads import FairThreads

MAX_BYTES = 1 << 30
THREADS = 2
RETRY_S = 1.0
T = TypeVar("T")


class IncomingBodies:
    """The bytes of unfinished bodies, by owner."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._room, self._threads = SharedRoom(most), FairThreads(THREADS, "packing")

    async def unpack(self, owner: str, body: bytes, work: Callable[[bytes], bytes]) -> bytes:
        """Run `work` with a packed body in a thread, and return its result. Raise the error of `add`."""
        self.add(owner, len(body))
        try:
            return await self.in_turn(owner, partial(work, body))
        finally:
            self.remove(owner, len(body))

    async def in_turn(self, owner: str, work: Callable[[], T]) -> T:
        """Run `work` in a thread once it is the turn of `owner`, and return its result."""
        return await self._threads.run(work, owner=owner)

    def close(self) -> None:
        self._threads.close()

    def add(self, owner: str, size: int) -> None:
        """Count bytes that have arrived. Raise Overloaded, and count nothing, if they exceed the owner's share of the
        limit.
        """
        if not self._room.takes(owner, size):
            raise no_room()
        self._room.add(owner, size)

    def remove(self, owner: str, size: int) -> None:
        """Stop counting bytes that `add` has counted. Call it when the body is complete or the request has ended."""
        self._room.remove(owner, size)


class ArrivingBytes:
    """Counts the bytes that have arrived on a connection, but belong to no message that the gateway has taken.

    Another library assembles the messages. Only this library knows how many bytes belong to unfinished messages, so the
    caller passes an upper bound for that number.
    """

    def __init__(self, bodies: IncomingBodies, owner: str) -> None:
        self._bodies, self._owner, self._size = bodies, owner, 0

    def give_to(self, owner: str) -> None:
        """Count the bytes as those of another owner. Raise Overloaded, and count nothing, if they exceed this owner's
        share of the limit.
        """
        size = self._size
        self.change(0, 0)
        self._owner = owner
        self.change(size, size)

    def change(self, by: int, most: int) -> None:
        """Count `by` bytes more (fewer if it is negative), but at most `most` in all. Raise Overloaded, and do not
        change the count, if the new count would exceed the owner's share of the limit.
        """
        more = min(max(0, self._size + by), most) - self._size
        if more > 0:
            self._bodies.add(self._owner, more)
        elif more:
            self._bodies.remove(self._owner, -more)
        self._size += more


def no_room() -> Overloaded:
    message = "The gateway is receiving as many bytes of unfinished requests as it may hold."
    return Overloaded(message, remedy="Try again.", details={"retry_after_s": RETRY_S})


INCOMING = web.AppKey("incoming", IncomingBodies)

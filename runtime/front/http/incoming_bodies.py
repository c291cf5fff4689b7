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
        """Return the result of `work` with a packed body, which a thread computes. Raise the error of `add`."""
        self.add(owner, len(body))
        try:
            return await self.in_turn(owner, partial(work, body))
        finally:
            self.remove(owner, len(body))

    async def in_turn(self, owner: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, which a thread computes in the turn of its owner."""
        return await self._threads.run(work, owner=owner)

    def close(self) -> None:
        self._threads.close()

    def add(self, owner: str, size: int) -> None:
        """Count bytes that have arrived. Raise Overloaded, and count nothing, if the owner has no room for them."""
        if not self._room.takes(owner, size):
            raise no_room()
        self._room.add(owner, size)

    def remove(self, owner: str, size: int) -> None:
        """Count bytes of `add` no longer: the body is complete, or the request has ended."""
        self._room.remove(owner, size)


class ArrivingBytes:
    """The bytes that have arrived on a connection whose messages another library puts together, and that are in no message that was taken.

    Only the library knows which of them belong to no message. So the caller names the most that unfinished messages may have.
    """

    def __init__(self, bodies: IncomingBodies, owner: str) -> None:
        self._bodies, self._owner, self._size = bodies, owner, 0

    def give_to(self, owner: str) -> None:
        """Count the bytes as those of another owner. Raise Overloaded, and count none, if it has no room."""
        size = self._size
        self.change(0, 0)
        self._owner = owner
        self.change(size, size)

    def change(self, by: int, most: int) -> None:
        """Count `by` bytes more, or fewer, but not more than `most`. Raise Overloaded, and count no more, if the owner has no room."""
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

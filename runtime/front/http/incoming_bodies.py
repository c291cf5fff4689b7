"""Limits the bytes of the request bodies that have arrived only in part. The owners of API keys share the limit."""

from __future__ import annotations

from aiohttp import web

from ....errors import Overloaded
from ...ground.access.fair_share import SharedRoom

MAX_BYTES = 1 << 30
RETRY_S = 1.0


class IncomingBodies:
    """The bytes of unfinished bodies, by owner."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._room = SharedRoom(most)

    def add(self, owner: str, size: int) -> None:
        """Count bytes that have arrived. Raise Overloaded, and count nothing, if the owner has no room for them."""
        if not self._room.takes(owner, size):
            message = "The gateway is receiving as many bytes of unfinished requests as it may hold."
            raise Overloaded(message, remedy="Try again.", details={"retry_after_s": RETRY_S})
        self._room.add(owner, size)

    def remove(self, owner: str, size: int) -> None:
        """Count bytes of `add` no longer: the body is complete, or the request has ended."""
        self._room.remove(owner, size)


INCOMING = web.AppKey("incoming", IncomingBodies)

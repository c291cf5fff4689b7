"""Limits the bytes of the request bodies that have arrived only in part. The owners of API keys share the limit."""

from __future__ import annotations

from collections import Counter

from aiohttp import web

from ...errors import Overloaded
from ..access.fair_share import share_used

MAX_BYTES = 1 << 30
RETRY_S = 1.0


class IncomingBodies:
    """The bytes of unfinished bodies, by owner. Callers without a key are one owner."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self._most, self._total = most, 0
        self._of: Counter[str] = Counter()

    def add(self, owner: str, size: int) -> None:
        """Count bytes that have arrived. Raise Overloaded, and count nothing, if the owner has no room for them."""
        free = self._most - self._total - size
        if free < 0 or share_used(self._of[owner] + size, free):
            message = "The gateway is receiving as many bytes of unfinished requests as it may hold."
            raise Overloaded(message, remedy="Try again.", details={"retry_after_s": RETRY_S})
        self._of[owner] += size
        self._total += size

    def remove(self, owner: str, size: int) -> None:
        """Count bytes of `add` no longer: the body is complete, or the request has ended."""
        self._of[owner] -= size
        if not self._of[owner]:
            del self._of[owner]
        self._total -= size


INCOMING = web.AppKey("incoming", IncomingBodies)

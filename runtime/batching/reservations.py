"""The promises: whoever was refused and comes back when told to is served before those who come for the first time.

Without them, obeying Retry-After under lasting overload would be as good as trying at any other moment. Callers are
recognised by what they send: the tenant and a digest of the body, so they need not know of this. Nobody gains by
being refused: a promise is for the time that was asked for, not for a call that is more patient than the refused one.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import xxhash

# How much earlier (a share of what he was told to wait) or later somebody may come and still find his place: clocks
# differ, and whole seconds are rounded up. Who tries again at once is not who was told to come.
EARLY = 0.1
LATE_S = 5.0
MAX_PROMISES = 10_000


@dataclass(slots=True, eq=False)
class _Promise:
    key: bytes
    begins_s: float
    ends_s: float
    most_s: float
    """What it was made to wanted its answer within so long: what wants more time is another call."""
    settled: bool = False


class Reservations:
    """When which refused caller was told to come again."""

    def __init__(self) -> None:
        self._due: deque[_Promise] = deque()
        self._of: dict[bytes, deque[_Promise]] = {}
        self._open = 0

    def __len__(self) -> int:
        return self._open

    def make(
        self, tenant: str, body: bytes, now_s: float, wait_s: float, timeout_s: float = math.inf
    ) -> None:
        """He is told to come again after `wait_s`. Of too many promises the oldest is forgotten."""
        begins_s, ends_s = now_s + (1 - EARLY) * wait_s, now_s + wait_s + LATE_S
        promise = _Promise(_key(tenant, body), begins_s, ends_s, timeout_s * (1 + EARLY))
        self._due.append(promise)
        self._of.setdefault(promise.key, deque()).append(promise)
        self._open += 1
        while self._open > MAX_PROMISES:
            self._forget()

    def keep(self, tenant: str, body: bytes, now_s: float, timeout_s: float = 0.0) -> bool:
        """Whether he was told to come about now, with a call that wants its answer as soon; a promise is kept once."""
        self._sweep(now_s)
        if not self._of:
            return False
        key = _key(tenant, body)
        while own := self._of.get(key):
            first = own[0]
            if now_s < first.begins_s or (timeout_s > first.most_s and now_s <= first.ends_s):
                return False
            self._settle(first)
            if now_s <= first.ends_s:
                return True
        return False

    def pending(self, now_s: float) -> int:
        """How many may still come; those whose time has passed are forgotten."""
        self._sweep(now_s)
        return self._open

    def _sweep(self, now_s: float) -> None:
        while self._due and (self._due[0].settled or self._due[0].ends_s < now_s):
            self._forget()

    def _forget(self) -> None:
        if not (oldest := self._due.popleft()).settled:
            self._settle(oldest)

    def _settle(self, promise: _Promise) -> None:
        promise.settled = True
        self._open -= 1
        own = self._of[promise.key]
        own.remove(promise)
        if not own:
            del self._of[promise.key]


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

"""Retry reservations: a refused caller who retries when told to is served before new callers.

Without them, obeying Retry-After under lasting overload would be no better than retrying at random. A caller
is recognised by the tenant and a digest of the body, so clients need not know of reservations. Being refused
gains nothing: a reservation covers only a call that is no more patient than the refused one.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import xxhash

# How much earlier (a share of the wait) or later a retry may come: clocks differ, Retry-After is rounded.
EARLY = 0.1
LATE_S = 5.0
MAX_RESERVATIONS = 10_000


class _Reservation(NamedTuple):
    key: bytes
    begins_s: float
    ends_s: float
    max_timeout_s: float


class Reservations:
    """When each refused caller was told to retry."""

    def __init__(self) -> None:
        # In the order in which they were made; each is open as long as it is also in the queue of its key.
        self._made: deque[_Reservation] = deque()
        self._open: dict[bytes, deque[_Reservation]] = {}
        self._count = 0

    def make(
        self, tenant: str, body: bytes, now_s: float, wait_s: float, timeout_s: float = math.inf
    ) -> None:
        """Reserve a place for a retry after `wait_s`; beyond the limit the oldest is dropped."""
        begins_s, ends_s = now_s + (1 - EARLY) * wait_s, now_s + wait_s + LATE_S
        made = _Reservation(_key(tenant, body), begins_s, ends_s, timeout_s * (1 + EARLY))
        self._made.append(made)
        self._open.setdefault(made.key, deque()).append(made)
        self._count += 1
        while self._count > MAX_RESERVATIONS:
            self._drop_oldest()

    def use(self, tenant: str, body: bytes, now_s: float, timeout_s: float = 0.0) -> bool:
        """Return True if this caller holds a reservation for this moment. A reservation is used once."""
        self._expire(now_s)
        if not self._open:
            return False
        key = _key(tenant, body)
        while own := self._open.get(key):
            first = own[0]
            if now_s < first.begins_s or (timeout_s > first.max_timeout_s and now_s <= first.ends_s):
                return False
            self._close_first(key)
            if now_s <= first.ends_s:
                return True
        return False

    def pending(self, now_s: float) -> int:
        """Return how many reservations may still be used."""
        self._expire(now_s)
        return self._count

    def _expire(self, now_s: float) -> None:
        while self._made and (self._made[0].ends_s < now_s or not self._is_open(self._made[0])):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = self._made.popleft()
        if self._is_open(oldest):
            self._close_first(oldest.key)

    def _is_open(self, oldest: _Reservation) -> bool:
        """Reservations of a key are closed in order, so the oldest of all is open if it is first there."""
        own = self._open.get(oldest.key)
        return own is not None and own[0] is oldest

    def _close_first(self, key: bytes) -> None:
        self._count -= 1
        own = self._open[key]
        own.popleft()
        if not own:
            del self._open[key]


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

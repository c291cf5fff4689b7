"""Retry reservations: a refused caller who retries when told to is served before new callers.

Without them, obeying Retry-After under lasting overload would be no better than retrying at random. A caller is
recognised by the tenant and a digest of the body, so clients need not know of reservations. Being refused gains nothing:
a reservation covers only a call that is no more patient than the refused one.
"""

from __future__ import annotations

import math
from collections import deque

import xxhash

# How much earlier (a share of the wait) or later a retry may come: clocks differ, and Retry-After is in whole seconds.
EARLY = 0.1
LATE_S = 5.0
MAX_RESERVATIONS = 10_000


class _Reservation:
    __slots__ = ("begins_s", "closed", "ends_s", "key", "max_timeout_s")

    def __init__(self, key: bytes, begins_s: float, ends_s: float, max_timeout_s: float) -> None:
        self.key = key
        self.begins_s = begins_s
        self.ends_s = ends_s
        self.max_timeout_s = max_timeout_s
        self.closed = False

    def close(self) -> None:
        """Mark it as used or expired; it stays in the order of expiry until it is met there."""
        self.closed = True


class Reservations:
    """When each refused caller was told to retry."""

    def __init__(self) -> None:
        self._by_expiry: deque[_Reservation] = deque()
        self._by_key: dict[bytes, deque[_Reservation]] = {}
        self._open = 0

    def __len__(self) -> int:
        return self._open

    def make(
        self, tenant: str, body: bytes, now_s: float, wait_s: float, timeout_s: float = math.inf
    ) -> None:
        """Reserve a place for a caller who is told to retry after `wait_s`; beyond the limit the oldest is dropped."""
        begins_s, ends_s = now_s + (1 - EARLY) * wait_s, now_s + wait_s + LATE_S
        made = _Reservation(_key(tenant, body), begins_s, ends_s, timeout_s * (1 + EARLY))
        self._by_expiry.append(made)
        self._by_key.setdefault(made.key, deque()).append(made)
        self._open += 1
        while self._open > MAX_RESERVATIONS:
            self._drop_oldest()

    def use(self, tenant: str, body: bytes, now_s: float, timeout_s: float = 0.0) -> bool:
        """Return True if this caller holds a reservation for this moment. A reservation is used once."""
        self._expire(now_s)
        if not self._by_key:
            return False
        key = _key(tenant, body)
        while own := self._by_key.get(key):
            first = own[0]
            if now_s < first.begins_s or (timeout_s > first.max_timeout_s and now_s <= first.ends_s):
                return False
            self._close(first)
            if now_s <= first.ends_s:
                return True
        return False

    def pending(self, now_s: float) -> int:
        """Return how many reservations may still be used."""
        self._expire(now_s)
        return self._open

    def _expire(self, now_s: float) -> None:
        while self._by_expiry and (self._by_expiry[0].closed or self._by_expiry[0].ends_s < now_s):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if not (oldest := self._by_expiry.popleft()).closed:
            self._close(oldest)

    def _close(self, reservation: _Reservation) -> None:
        reservation.close()
        self._open -= 1
        own = self._by_key[reservation.key]
        own.remove(reservation)
        if not own:
            del self._by_key[reservation.key]


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

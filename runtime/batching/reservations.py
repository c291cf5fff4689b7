"""Retry reservations: a refused caller who retries when told to is served before new callers.

Without them, obeying Retry-After under lasting overload would be no better than retrying at random. A caller
is recognised by the tenant and a digest of the body, so clients need not know of reservations. Being refused
gains nothing: a reservation covers only a call that is no more patient than the refused one.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass

import xxhash

# How much earlier (a share of the wait) or later a retry may come: clocks differ, Retry-After is rounded.
EARLY = 0.1
LATE_S = 5.0
MAX_RESERVATIONS = 10_000


@dataclass(frozen=True, eq=False, slots=True)
class _Reservation:
    key: bytes
    begins_s: float
    ends_s: float
    max_timeout_s: float


class Reservations:
    """When each refused caller was told to retry."""

    def __init__(self) -> None:
        # In the order in which they were made; those of one key are closed in this order too.
        self._open: OrderedDict[_Reservation, None] = OrderedDict()
        self._by_key: dict[bytes, deque[_Reservation]] = {}

    def make(
        self, tenant: str, body: bytes, now_s: float, wait_s: float, timeout_s: float = math.inf
    ) -> None:
        """Reserve a place for a retry after `wait_s`; beyond the limit the oldest is dropped."""
        begins_s, ends_s = now_s + (1 - EARLY) * wait_s, now_s + wait_s + LATE_S
        made = _Reservation(_key(tenant, body), begins_s, ends_s, timeout_s * (1 + EARLY))
        self._open[made] = None
        self._by_key.setdefault(made.key, deque()).append(made)
        if len(self._open) > MAX_RESERVATIONS:
            self._close(next(iter(self._open)))

    def use(self, tenant: str, body: bytes, now_s: float, timeout_s: float = 0.0) -> bool:
        """Return True if this caller holds a reservation for this moment. A reservation is used once."""
        self._expire(now_s)
        key = _key(tenant, body) if self._open else b""
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
        return len(self._open)

    def _expire(self, now_s: float) -> None:
        while self._open and (oldest := next(iter(self._open))).ends_s < now_s:
            self._close(oldest)

    def _close(self, first: _Reservation) -> None:
        """Forget the first reservation of its key."""
        del self._open[first]
        own = self._by_key[first.key]
        own.popleft()
        if not own:
            del self._by_key[first.key]


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

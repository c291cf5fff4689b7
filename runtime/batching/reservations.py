"""Records reservations: a refused caller who retries when told to is served before new callers.

Without reservations, a caller who follows Retry-After during a long overload would do no better than one who
retries at random. A caller is recognised by the tenant and a digest of the body, so clients need not know of
reservations. A reservation is not valid for a retry with a much longer timeout than that of the refused
request: otherwise a caller could first send a request that is sure to be refused, and so be served earlier.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

import xxhash

# Tolerances, because clocks differ and Retry-After is rounded. EARLY: a retry may come earlier by this share
# of the wait, and its timeout may be longer by this share. LATE_S: a retry may come this many seconds later.
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
    """The reservations that are not used yet, and when each is valid."""

    def __init__(self) -> None:
        # All reservations in the order in which they were made. Those of one key are also used in this order.
        self._open: OrderedDict[_Reservation, None] = OrderedDict()
        self._by_key: dict[bytes, deque[_Reservation]] = {}

    def make(self, tenant: str, body: bytes, now_s: float, wait_s: float, timeout_s: float) -> None:
        """Add a reservation for a retry after `wait_s`. Drop the oldest reservation if there are too many."""
        begins_s, ends_s = now_s + (1 - EARLY) * wait_s, now_s + wait_s + LATE_S
        made = _Reservation(_key(tenant, body), begins_s, ends_s, timeout_s * (1 + EARLY))
        self._open[made] = None
        self._by_key.setdefault(made.key, deque()).append(made)
        if len(self._open) > MAX_RESERVATIONS:
            self._close(next(iter(self._open)))

    def use(self, tenant: str, body: bytes, now_s: float, timeout_s: float) -> bool:
        """Use up a reservation of this caller that is valid now. Return False if there is none."""
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
        """Return the number of reservations. It may include ended ones that are not the oldest."""
        self._expire(now_s)
        return len(self._open)

    def _expire(self, now_s: float) -> None:
        """Forget the oldest reservations, up to the first that has not ended."""
        while self._open and (oldest := next(iter(self._open))).ends_s < now_s:
            self._close(oldest)

    def _close(self, first: _Reservation) -> None:
        """Forget a reservation, which must be the oldest of its key."""
        del self._open[first]
        own = self._by_key[first.key]
        own.popleft()
        if not own:
            del self._by_key[first.key]


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

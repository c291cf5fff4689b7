"""Records reservations. A refused caller who retries at the time that Retry-After names is served before new callers.

Without reservations, a caller that follows Retry-After during a long overload would do no better than a caller that
retries at random. The tenant and a digest of the body identify a caller, so clients need no support for reservations.
A reservation is not valid for a retry with a much longer timeout than the refused request had. If it were, a caller
could get served earlier by first sending a request that is sure to be refused.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count

import xxhash

# Tolerances, because clocks differ and Retry-After is rounded. EARLY: a retry may come earlier by this share
# of the wait, and its timeout may be longer than the first timeout by this share. LATE_S: a retry may come this many seconds later.
EARLY = 0.1
LATE_S = 5.0
MAX_RESERVATIONS = 10_000


@dataclass(frozen=True, order=True, slots=True)
class _Reservation:
    """One reservation. Reservations are compared by their ends, then by their numbers."""

    ends_s: float
    number: int
    key: bytes = field(compare=False)
    begins_s: float = field(compare=False)
    max_timeout_s: float = field(compare=False)


class Reservations:
    """The unused reservations, and the time in which each is valid."""

    def __init__(self) -> None:
        # By number, in the order in which they were made. Reservations with the same key are used in this order too.
        self._open: dict[int, _Reservation] = {}
        self._by_key: dict[bytes, dict[int, _Reservation]] = {}
        # A heap with the earliest end first. The entry of a used reservation stays until the end of the reservation.
        self._ends: list[_Reservation] = []
        self._numbers = count()

    def make(self, tenant: str, body: bytes, now_s: float, wait_s: float, timeout_s: float) -> None:
        """Add a reservation for a retry after `wait_s`. Drop the oldest reservation if there are too many."""
        begins_s, ends_s = now_s + (1 - EARLY) * wait_s, now_s + wait_s + LATE_S
        key, number = _key(tenant, body), next(self._numbers)
        made = _Reservation(ends_s, number, key, begins_s, timeout_s * (1 + EARLY))
        self._open[number] = self._by_key.setdefault(key, {})[number] = made
        heapq.heappush(self._ends, made)
        if len(self._open) > MAX_RESERVATIONS:
            self._close(next(iter(self._open.values())))
        if len(self._ends) > 2 * MAX_RESERVATIONS:
            self._ends = sorted(self._open.values())

    def use(self, tenant: str, body: bytes, now_s: float, timeout_s: float) -> bool:
        """Use up a reservation of this caller that is valid now. Return False if there is no such reservation."""
        self._expire(now_s)
        key = _key(tenant, body) if self._open else b""
        while own := self._by_key.get(key):
            first = next(iter(own.values()))
            if now_s < first.begins_s or (timeout_s > first.max_timeout_s and now_s <= first.ends_s):
                return False
            self._close(first)
            if now_s <= first.ends_s:
                return True
        return False

    def pending(self, now_s: float) -> int:
        """Return the number of reservations that have not ended."""
        self._expire(now_s)
        return len(self._open)

    def _expire(self, now_s: float) -> None:
        """Forget the reservations that have ended."""
        while self._ends and self._ends[0].ends_s < now_s:
            ended = heapq.heappop(self._ends)
            if ended.number in self._open:
                self._close(ended)

    def _close(self, reservation: _Reservation) -> None:
        """Forget a reservation."""
        del self._open[reservation.number]
        own = self._by_key[reservation.key]
        del own[reservation.number]
        if not own:
            del self._by_key[reservation.key]


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

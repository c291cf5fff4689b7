"""The promises: whoever was refused and comes back when told to is served before those who come for the first time.

Without them, obeying Retry-After under lasting overload would be as good as trying at any other moment. Callers are
recognised by what they send: the tenant and a digest of the body, so they need not know of this.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

# How much earlier or later than told somebody may come and still find his place: clocks, and whole seconds.
EARLY_S = 0.25
LATE_S = 5.0
MAX_PROMISES = 10_000


class Promises:
    """When which refused caller was told to come again."""

    def __init__(self) -> None:
        self._due: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def make(self, tenant: str, body: bytes, due_s: float) -> None:
        """He is expected at `due_s`. Of too many the oldest is forgotten."""
        key = _key(tenant, body)
        self._due[key] = due_s
        self._due.move_to_end(key)
        while len(self._due) > MAX_PROMISES:
            self._due.popitem(last=False)

    def keep(self, tenant: str, body: bytes, now_s: float) -> bool:
        """Whether he was told to come about now; a promise is kept once."""
        if not self._due:
            return False
        key = _key(tenant, body)
        due_s = self._due.get(key)
        if due_s is None or now_s < due_s - EARLY_S:
            return False
        del self._due[key]
        return now_s <= due_s + LATE_S

    def pending(self, now_s: float) -> int:
        """How many may still come; those whose time has passed are forgotten."""
        while self._due and next(iter(self._due.values())) + LATE_S < now_s:
            self._due.popitem(last=False)
        return len(self._due)


def _key(tenant: str, body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(tenant.encode() + b"\0" + body)

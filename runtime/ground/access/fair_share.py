"""Limits how much of a shared resource one owner may use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ....errors import Overloaded

FREE_SHARE = 9
"""An owner may use nine times as much as is free. So a single owner may use nine tenths of the resource. If there are more
owners, each may use less, and a part stays free for a new owner. This is the dynamic threshold of Choudhury and Hahne, "Dynamic
queue length thresholds for shared-memory packet switches" (1998)."""


def share_used(own: int, free: int) -> bool:
    """Return True if an owner that uses `own` has reached its share. `free` is what no owner uses."""
    return own >= FREE_SHARE * free


class SharedRoom:
    """Counts how much each owner uses of `most` bytes, or of other units. Callers without a key are one owner."""

    def __init__(self, most: int) -> None:
        self._most, self._total = most, 0
        self._of: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """How much all owners use."""
        return self._total

    def takes(self, owner: str, size: int) -> bool:
        """Return True if the owner may use `size` more."""
        free = self._most - self._total - size
        return free >= 0 and not share_used(self._of[owner] + size, free)

    def add(self, owner: str, size: int) -> None:
        self._of[owner] += size
        self._total += size

    @contextmanager
    def held(self, owner: str, size: int, what: str) -> Iterator[None]:
        """Count `size` while the block runs. If the owner may not use `size` more, raise Overloaded with `what` in its message."""
        if not self.takes(owner, size):
            message = f"The gateway holds as many bytes of {what} as it may."
            raise Overloaded(message, remedy="Try again.", details={"retry_after_s": 1.0})
        self.add(owner, size)
        try:
            yield
        finally:
            self.remove(owner, size)

    def remove(self, owner: str, size: int) -> None:
        """Subtract what `add` has counted."""
        self._of[owner] -= size
        if not self._of[owner]:
            del self._of[owner]
        self._total -= size

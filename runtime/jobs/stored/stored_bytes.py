"""Limits the bytes of inputs and results in the store. The owners of jobs share the limit.

The table `stored` has the bytes of each owner, and of all jobs. Transactions change the table together with the bodies.
`StoredBytes` is a copy of the table, which is updated after each commit.
"""

from __future__ import annotations

from collections.abc import Mapping

from ....errors import QueueFull
from ...ground.access.fair_share import share_used
from ...ground.access.keys import ALL

REMEDY = "Try again when results have expired, or raise max_stored_bytes, or lower keep_result_s."


class StoredBytes:
    """The stored bytes by owner. `ALL` has the sum."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._of: dict[str, int] = {}

    @property
    def of_all(self) -> int:
        return self._of.get(ALL, 0)

    def load(self, found: Mapping[str, int]) -> None:
        self._of = dict(found)

    def add(self, added: Mapping[str, int]) -> None:
        """Count the changes of a committed transaction."""
        for owner, size in added.items():
            self._of[owner] = self._of.get(owner, 0) + size
            if not self._of[owner]:
                del self._of[owner]

    def refusal(self, owner: str, size: int) -> QueueFull | None:
        """Return an error if the owner may not store `size` more bytes, or could store no result after them. Otherwise,
        return None.
        """
        free = self.most - self.of_all - size
        if free < 0:
            return QueueFull(
                f"The gateway stores as many bytes of jobs as max_stored_bytes allows, which is {self.most}.",
                remedy=REMEDY,
            )
        if owner and share_used((own := self._of.get(owner, 0)) + size, free):
            return QueueFull(
                f"The gateway stores {own} bytes of your jobs. The rest of max_stored_bytes is kept for"
                " other callers.",
                remedy=REMEDY,
            )
        return None

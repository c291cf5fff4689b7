"""Tells up to which offset all messages of a partition are finished, although they finish in any order."""

from __future__ import annotations

import heapq


class TakenOffsets:
    """The offsets of one partition that were taken, and the offsets among them that are finished."""

    def __init__(self) -> None:
        self._open: list[int] = []
        """A heap. Offsets in `_finished` stay until they are at its top."""
        self._finished: set[int] = set()
        self._next: int | None = None

    def take(self, offset: int) -> None:
        """Note that a message was received. Offsets come in rising order; some may be missing."""
        heapq.heappush(self._open, offset)
        self._next = offset + 1

    def finish(self, offset: int) -> None:
        """Note that a taken message is finished."""
        self._finished.add(offset)
        while self._open and self._open[0] in self._finished:
            self._finished.discard(heapq.heappop(self._open))

    @property
    def resume_at(self) -> int | None:
        """The offset of the first message that is not finished, where another consumer has to begin. None if nothing was taken."""
        return self._open[0] if self._open else self._next

    @property
    def span(self) -> int:
        """The number of messages that another consumer would receive again."""
        return len(self._open)

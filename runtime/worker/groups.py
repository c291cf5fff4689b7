"""Groups: what runs in one call of the handler, on its way from the link's thread to the runner's threads."""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Groups(Generic[T]):
    """A queue of groups, in order of arrival. None of them is empty."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[T]] = queue.SimpleQueue()

    def put(self, group: list[T]) -> None:
        self._queue.put(group)

    def take(self) -> list[T]:
        """Blocks until there is one; empty once closed."""
        return self._queue.get()

    def close(self, takers: int = 1) -> list[T]:
        """Ends every `take`, and returns what nobody took."""
        left: list[T] = []
        while True:
            try:
                left += self._queue.get_nowait()
            except queue.Empty:
                break
        for _ in range(takers):
            self._queue.put([])
        return left

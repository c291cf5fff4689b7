"""Host memory from which copies to a device are fast. The buffers are pinned once, and all uploads share them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....machine import processors

if TYPE_CHECKING:
    from .copy_event import CopyEvent

MOST_THREADS = 8


def copying_threads() -> int:
    """Return how many threads fill buffers for one upload."""
    return max(1, min(MOST_THREADS, int(processors())))


class HostBuffers:
    """At most two buffers for each thread of an upload: the thread fills one buffer while the other is being copied."""

    def __init__(self, pin: Callable[[int], Tensor]) -> None:
        """`pin` returns pinned memory of a size in bytes, or raises RuntimeError."""
        self._pin, self._most = pin, 2 * copying_threads()
        self._made = 0
        self._free: list[tuple[Tensor, CopyEvent | None]] = []
        self._changed = threading.Condition()

    def reserve(self, count: int, size_bytes: int) -> None:
        """Allocate buffers before they are needed, until there are `count` buffers or as many as allowed."""
        with self._changed:
            new = max(0, min(count, self._most) - self._made)
            self._made += new
        for _ in range(new):
            self.give(self._new(size_bytes), None)

    def take(self, size_bytes: int) -> Tensor:
        """Return a buffer of at least this size from which no copy reads any more. Block while all buffers are in use."""
        with self._changed:
            while (number := self._chosen(size_bytes)) is None and self._made == self._most:
                self._changed.wait()
            if number is None:
                self._made += 1
                buffer, event = torch.empty(0), None
            else:
                buffer, event = self._free.pop(number)
        try:
            if event is not None:
                event.wait()
            return buffer if buffer.numel() >= size_bytes else self._new(size_bytes)
        except BaseException:
            self.give(buffer, None)
            raise

    def give(self, buffer: Tensor, event: CopyEvent | None) -> None:
        """Give a buffer back. `take` returns the buffer again only after `event`, the end of the copy from the buffer."""
        with self._changed:
            self._free.append((buffer, event))
            self._changed.notify()

    def _chosen(self, size_bytes: int) -> int | None:
        """Return the number of a free buffer that is ready and large enough. If there is no such buffer, and no new buffer may
        be made, return the number of any free buffer.
        """
        for number, (buffer, event) in enumerate(self._free):
            if buffer.numel() >= size_bytes and (event is None or event.done()):
                return number
        return 0 if self._free and self._made == self._most else None

    def _new(self, size_bytes: int) -> Tensor:
        try:
            return self._pin(size_bytes)
        except RuntimeError:
            # Use pageable memory. Copies from it are slower, but correct.
            return torch.empty(size_bytes, dtype=torch.uint8)

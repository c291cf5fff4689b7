"""Memory that the machine has touched: a ballast is touched and freed just before another contestant's clock starts.

In a virtual machine the first touch of a page is slow if the hypervisor does not back it: it never has, or the guest has
reported the page as free since (free page reporting of virtio-balloon). A machine in use has pages of both kinds. What is
freed last is given out first, but by size: 4 KiB pages that were freed go to those who want such pages, and huge pages to
those who want huge ones. So a contestant gets touched pages only from a ballast of its own kind.
"""

from __future__ import annotations

import mmap

import numpy as np

SHARE = 1.5
"""Of the size of the object: what is fetched, and what the fetch itself needs."""


class Ballast:
    """A lane's contestant that touches memory, in `huge` pages or small ones, and frees it before its turn ends."""

    def __init__(self, size_bytes: int, huge: bool) -> None:
        self._size_bytes, self._huge = int(SHARE * size_bytes), huge

    def run(self) -> None:
        with mmap.mmap(-1, self._size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE if self._huge else mmap.MADV_NOHUGEPAGE)
            pages = np.frombuffer(memory, dtype=np.uint8)
            pages[:: mmap.PAGESIZE] = 1
            del pages

    def check(self) -> None:
        """There is nothing to compare."""

    def clear(self) -> None:
        """Nothing is held."""

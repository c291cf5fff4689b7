"""Memory that the machine has touched: a ballast is touched and freed just before another contestant's clock starts.

In a virtual machine the first touch of a page is slow if the hypervisor does not back it: it never has, or the guest has
reported the page as free since (free page reporting of virtio-balloon). A machine in use has pages of both kinds. The
kernel hands out the most recently freed pages first, separately for each size: freed 4 KiB pages go to requests for 4 KiB
pages, and freed huge pages to requests for huge pages. So a contestant gets touched pages only from a ballast of its own
page size.
"""

from __future__ import annotations

import mmap

import numpy as np

SHARE = 1.5
"""The ballast's size relative to the object: room for the fetched bytes and for the memory of the fetch itself."""


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

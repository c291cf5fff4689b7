"""Memory that the machine has touched: a ballast is touched and freed just before another contestant's clock starts.

In a virtual machine the first touch of a page is slow if the hypervisor has never backed it, and costs little otherwise. A
machine in use has pages of both kinds. What is freed last is given out first, so the next contestant gets touched pages.
"""

from __future__ import annotations

import mmap

import numpy as np

SHARE = 1.5
"""Of the size of the object: what is fetched, and what the fetch itself needs."""


class Ballast:
    """A lane's contestant that touches memory, and lets go of it before its turn ends."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = int(SHARE * size_bytes)

    def run(self) -> None:
        with mmap.mmap(-1, self._size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            pages = np.frombuffer(memory, dtype=np.uint8)
            pages[:: mmap.PAGESIZE] = 1
            del pages

    def check(self) -> None:
        """There is nothing to compare."""

    def clear(self) -> None:
        """Nothing is held."""

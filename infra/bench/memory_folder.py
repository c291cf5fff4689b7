"""The folder in memory of a benchmark, with huge pages if this user may mount, like the cache of a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotflame.snapshot.caching.memory import mount, unmount

SMALL_PAGES = Path("/dev/shm")
_MOUNTED = Path(__file__).resolve().parents[2] / "build" / "bench" / "memory"
_SIZE_BYTES = 10 << 30


@contextmanager
def mounted(size_bytes: int = _SIZE_BYTES) -> Iterator[None]:
    """Mount a folder with huge pages during the block, if possible. It holds at most `size_bytes`."""
    _MOUNTED.mkdir(parents=True, exist_ok=True)
    made = not _MOUNTED.is_mount() and mount(_MOUNTED, size_bytes)
    try:
        yield
    finally:
        if made:
            unmount(_MOUNTED)


def memory_folder() -> Path:
    """Return our folder with huge pages if it is mounted, else the machine's ordinary shared memory."""
    return _MOUNTED if _MOUNTED.is_mount() else SMALL_PAGES

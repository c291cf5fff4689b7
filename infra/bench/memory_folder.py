"""Where our own contestants put files: in memory, with huge pages if this user may mount (as the node's cache does)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotflame.snapshot.caching.memory import has_huge_pages, mount, unmount

SMALL_PAGES = Path("/dev/shm")
_MOUNTED = Path(__file__).resolve().parents[2] / "build" / "bench" / "memory"
_SIZE_BYTES = 10 << 30


@contextmanager
def mounted(size_bytes: int = _SIZE_BYTES) -> Iterator[None]:
    """For the time of a benchmark there is one with huge pages, for its lanes too. It holds at most `size_bytes`."""
    _MOUNTED.mkdir(parents=True, exist_ok=True)
    made = not _MOUNTED.is_mount() and mount(_MOUNTED, size_bytes)
    try:
        yield
    finally:
        if made:
            unmount(_MOUNTED)


def unmount_left() -> None:
    """Unmount the file system that a killed benchmark has left mounted. This deletes all files in it."""
    if _MOUNTED.is_mount():
        unmount(_MOUNTED)


def memory_folder() -> Path:
    """Return our folder with huge pages if it is mounted, else the machine's ordinary shared memory."""
    return _MOUNTED if _MOUNTED.is_mount() else SMALL_PAGES


def told() -> str:
    """For the report."""
    folder = memory_folder()
    return f"our files lie in {folder}, huge pages: {'yes' if has_huge_pages(folder) else 'no'}"

"""Locks files and folders with flock. The kernel releases such a lock when the process that holds the lock dies.

A lock belongs to the open file description, not to the process. If one process opens a file twice, the two
descriptions exclude each other like two processes. If a forked child inherits the descriptor, the lock is held until
both parent and child have closed it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import CacheError

LOCK_TIMEOUT_S = 60.0


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock the open file without waiting. Return False if another lock prevents it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_file(path: Path, timeout_s: float = LOCK_TIMEOUT_S, *, read_only: bool = False) -> Iterator[int]:
    """Open a file, lock it, and yield its descriptor. Raise CacheError after `timeout_s`.

    The file is created if it is absent. With `read_only`, it is not created, and need not be writable.
    """
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o600)
    try:
        if not try_lock(descriptor, exclusive=True):
            _lock_within(descriptor, path, timeout_s)
        yield descriptor
    finally:
        os.close(descriptor)


def _lock_within(descriptor: int, path: Path, timeout_s: float) -> None:
    """Wait for the exclusive lock. Raise CacheError after `timeout_s`."""
    # flock has no timeout, so a thread calls it. The thread has a duplicate of the descriptor, because after a timeout
    # the caller closes its own descriptor, and another file may get that number before the thread calls flock. After a
    # timeout, the thread goes on waiting until it gets the lock, and releases it at once by closing the duplicate.
    # After a success the lock stays, since the caller's descriptor is of the same open file description.
    own = os.dup(descriptor)

    def wait() -> None:
        try:
            fcntl.flock(own, fcntl.LOCK_EX)
        finally:
            os.close(own)

    waiter = threading.Thread(target=wait, daemon=True)
    try:
        waiter.start()
    except RuntimeError:
        os.close(own)
        raise
    waiter.join(timeout_s)
    if waiter.is_alive():
        remedy = "See with `lslocks` which process holds it, and whether that is stopped."
        raise CacheError(f"{path} stayed locked for {timeout_s:.0f} s.", remedy=remedy)


class FolderLock:
    """A shared lock on a folder, which protects it from eviction while anything refers to this object.

    Mapped memory refers to this lock, so the files of a tensor are protected as long as the tensor exists.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pid = os.getpid()

    def __del__(self) -> None:
        # Close no descriptor in a forked child, where the number may belong to another file now.
        if os.getpid() == self._pid:
            os.close(self.descriptor)


def lock_folder(folder: Path, *, exclusive: bool) -> int | None:
    """Open and lock `folder`, and return the descriptor. None if the folder is absent, moved away or locked."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if try_lock(descriptor, exclusive=exclusive) and is_at(descriptor, folder):
        return descriptor
    os.close(descriptor)
    return None


def lock_shared(folder: Path) -> FolderLock | None:
    """Lock `folder` against eviction. Return None if the folder is absent or locked exclusively."""
    descriptor = lock_folder(folder, exclusive=False)
    return None if descriptor is None else FolderLock(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if `path` still names the open file or folder, which may have been renamed or removed."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

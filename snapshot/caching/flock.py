"""Locks that the kernel releases when their holder dies: flock on an open file or folder.

A lock belongs to the open file, not to the process: two openings in one process exclude each other as two
processes do, and a forked child that inherited the descriptor holds the lock with its parent until both have
closed it.
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
    """Lock the open file at once; return False if another lock is in the way."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def locked_file(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[int]:
    """Open, or make, file `path` and lock it exclusively. CacheError if its holder keeps it for too long."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not try_lock(descriptor, exclusive=True):
            _wait_for_lock(descriptor, path, timeout_s)
        yield descriptor
    finally:
        os.close(descriptor)


def _wait_for_lock(descriptor: int, path: Path, timeout_s: float) -> None:
    # flock has no timeout, so a thread waits for it. One that waits in vain ends with the holder: the kernel
    # keeps the open file for it, and releases the lock at once, as nothing else has the file open by then.
    waiter = threading.Thread(target=fcntl.flock, args=(descriptor, fcntl.LOCK_EX), daemon=True)
    waiter.start()
    waiter.join(timeout_s)
    if waiter.is_alive():
        remedy = "See with `lslocks` which process holds it, and whether that is stopped."
        raise CacheError(f"{path} stayed locked for {timeout_s:.0f} s.", remedy=remedy)


class Hold:
    """A shared lock on a folder, which protects it from eviction. Released with the last reference.

    Mapped memory keeps a reference, so tensors protect their files for as long as they live.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pid = os.getpid()

    def __del__(self) -> None:
        # In a forked child that closed what it inherited, the number may name another file by now.
        if os.getpid() == self._pid:
            os.close(self.descriptor)


def lock_folder(folder: Path, *, exclusive: bool) -> int | None:
    """Open and lock `folder`; None if it is not there, is being moved away, or another lock is in the way."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if try_lock(descriptor, exclusive=exclusive) and is_at(descriptor, folder):
        return descriptor
    os.close(descriptor)
    return None


def hold(folder: Path) -> Hold | None:
    """Hold `folder`; None if it is not there, is being moved away, or is locked exclusively."""
    descriptor = lock_folder(folder, exclusive=False)
    return None if descriptor is None else Hold(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return True if the open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

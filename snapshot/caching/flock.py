"""Locks that the kernel lets go when their holder dies, however it dies: flock on an open file or folder.

A lock belongs to the open file, not to the process: two openings in one process exclude each other as two processes
do, and a forked child that inherited the descriptor holds the lock with its parent until both have closed it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

from ...errors import CacheError

LOCK_TIMEOUT_S = 60.0


def try_lock(descriptor: int, *, exclusive: bool) -> bool:
    """Lock the open file at once, or say that somebody else's lock is in the way."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock(descriptor: int, path: Path, *, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Lock the open file exclusively; CacheError naming `path` if whoever holds it does not let go in time."""
    if try_lock(descriptor, exclusive=True):
        return
    # flock knows no deadline, so a thread waits for it. One that waits in vain ends with the holder: the kernel
    # keeps the open file for it, and lets the lock go again as nobody else has it open by then.
    waiter = threading.Thread(target=fcntl.flock, args=(descriptor, fcntl.LOCK_EX), daemon=True)
    waiter.start()
    waiter.join(timeout_s)
    if waiter.is_alive():
        raise CacheError(
            f"{path} stayed locked for {timeout_s:.0f} s.",
            remedy="See with `lslocks` which process holds it, and whether that is stopped.",
        )


class Hold:
    """A shared lock on a folder: it is not evicted while anybody has one. Let go when the last reference goes.

    Mapped memory keeps a reference, so tensors protect their files for as long as they live. A forked child shares
    the lock until it exits or closes the descriptor; one that closes what it inherited opens the snapshot itself.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._pid = os.getpid()

    def __del__(self) -> None:
        # In a forked child that closed what it inherited, the number may be another file's by now.
        if os.getpid() == self._pid:
            os.close(self.descriptor)


def hold(folder: Path) -> Hold | None:
    """A Hold of `folder`; None if it is not there, is being moved away, or is locked exclusively."""
    try:
        held = Hold(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return held if try_lock(held.descriptor, exclusive=False) and is_at(held.descriptor, folder) else None


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file or folder is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

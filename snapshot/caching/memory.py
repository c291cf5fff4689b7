"""A node's memory as a file system: a tmpfs with huge pages, where the kernel lets this process mount one.

A fetch into fresh memory waits mostly for page faults, one for each 4 KiB. With pages of 2 MiB the same bytes
come in faster, and are mapped with a five-hundredth of the faults (docs/snapshot-choices.md). Shared memory
has small pages unless its mount says otherwise, and only root may mount. Other users get a folder in it; an
administrator can give that huge pages with `mount -o remount,huge=within_size /dev/shm`.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a private folder is made below it
LEFT_AFTER_S = 3600.0
"""How long an empty root must be unchanged before it counts as left behind."""
SLACK_BYTES = 16 << 20
"""For manifests, locks and rounding: budgets count shards alone."""

# From <sys/mount.h>. Nothing on this file system is ever executed, or a device.
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_UMOUNT_NOFOLLOW = 8
_libc = ctypes.CDLL(None, use_errno=True)


def prepare(root: Path, size_bytes: int) -> bool:
    """Make folder `root` in shared memory, with huge pages if possible. Return True if it is private.

    A root that exists stays as it is. Only one process at a time may call this.
    """
    if not root.parent.is_dir() or not os.access(root.parent, os.W_OK):
        return False
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
        mount(root, size_bytes + SLACK_BYTES)
    return is_ours(root)


def is_ours(root: Path) -> bool:
    """Return True if only this user can write to folder `root`: in shared memory any user may make it."""
    with suppress(OSError):
        status = root.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return False


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount a tmpfs with huge pages on `folder`. Return True if that was allowed.

    within_size: a huge page only where a file fills it, so that no file takes more than its size.
    """
    options = f"huge=within_size,mode=0700,size={size_bytes}".encode()
    flags = _NOSUID | _NODEV | _NOEXEC
    return bool(_libc.mount(b"pilotflame", os.fsencode(folder), b"tmpfs", flags, options) == 0)


def unmount(folder: Path) -> bool:
    """Unmount `folder`, with all that is in it. Return True if it was mounted and not in use."""
    return bool(_libc.umount2(os.fsencode(folder), _UMOUNT_NOFOLLOW) == 0)


def give_back(root: Path) -> None:
    """Unmount and remove `root` if it is empty. Only one process at a time may call this."""
    with suppress(OSError):
        if root.is_mount() and not any(root.iterdir()):
            unmount(root)
        root.rmdir()


def sweep(roots: Iterable[Path], own: Path) -> None:
    """Give back the empty roots that killed processes left, except `own`.

    A young root is kept: another process may have just made it. The kernel keeps a mount that is in use.
    """
    before_s = time.time() - LEFT_AFTER_S
    for root in roots:
        # Another process may sweep too.
        with suppress(OSError):
            status = root.lstat()
            if root != own and is_ours(root) and max(status.st_mtime, status.st_ctime) < before_s:
                give_back(root)


def has_huge_pages(folder: Path) -> bool:
    """Return True if files in `folder` get huge pages, by the mount options of its file system."""
    device = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    options = [option for line in lines if line[2] == device for option in line[-1].split(",")]
    return any(option in {"huge=always", "huge=within_size"} for option in options)

"""A node's memory as a file system: a tmpfs of its own with huge pages, where the kernel lets us mount one.

Fresh memory in pages of 4 KiB is what a fetch waits for most: every page is a fault of its own. In pages of 2 MiB the same
bytes come in faster, and are mapped with a five-hundredth of the faults (docs/snapshot-choices.md). Shared memory
has small pages unless its mount says otherwise, and only root may mount. Everybody else gets a folder in it, and can have
an administrator say `mount -o remount,huge=within_size /dev/shm`.
"""

from __future__ import annotations

import ctypes
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a folder of our own below it, made private
LEFT_AFTER_S = 3600.0
"""For how long nothing may have happened to an empty root before it is taken for one that was left."""
SLACK_BYTES = 16 << 20
"""For manifests, locks and what rounding takes: budgets count shards alone."""

# From <sys/mount.h>; nothing in there is ever to be executed, or a device.
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_UMOUNT_NOFOLLOW = 8
_libc = ctypes.CDLL(None, use_errno=True)


def prepare(root: Path, size_bytes: int) -> bool:
    """Make folder `root` in shared memory, with huge pages if that may be; whether it is there, and nobody else's.

    What is there already stays as it is. To be called by one process at a time.
    """
    if not root.parent.is_dir() or not os.access(root.parent, os.W_OK):
        return False
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
        mount(root, size_bytes + SLACK_BYTES)
    return is_ours(root)


def is_ours(root: Path) -> bool:
    """Whether nobody else can have put, or can put, anything there. Anybody may make folders in shared memory."""
    try:
        status = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def mount(folder: Path, size_bytes: int) -> bool:
    """Put a tmpfs with huge pages on `folder`; whether that was allowed.

    within_size: a huge page where a file fills it, so that no file takes more than its size.
    """
    options = f"huge=within_size,mode=0700,size={size_bytes}".encode()
    flags = _NOSUID | _NODEV | _NOEXEC
    return bool(_libc.mount(b"pilotflame", os.fsencode(folder), b"tmpfs", flags, options) == 0)


def unmount(folder: Path) -> bool:
    """Take it away again, with all that is in it; whether it was there and nobody used it."""
    return bool(_libc.umount2(os.fsencode(folder), _UMOUNT_NOFOLLOW) == 0)


def give_back(root: Path) -> None:
    """Leave nothing of an empty `root` behind. To be called by one process at a time."""
    with suppress(OSError):
        if root.is_mount() and not any(root.iterdir()):
            unmount(root)
        root.rmdir()


def sweep(roots: Iterable[Path], own: Path) -> None:
    """Take away what killed processes left of other caches: our roots with nothing in them, for an hour at least.

    Younger ones may just have been made, by a process that has not come to put anything there. The kernel keeps a mount
    that is in use; who finds its root gone makes it anew.
    """
    before_s = time.time() - LEFT_AFTER_S
    for root in roots:
        with suppress(OSError):  # another sweeps too
            status = root.lstat()
            if root != own and is_ours(root) and max(status.st_mtime, status.st_ctime) < before_s:
                give_back(root)


def has_huge_pages(folder: Path) -> bool:
    """Whether files in `folder` get them: by how the file system that it lies on was mounted."""
    device = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    options = [option for line in lines if line[2] == device for option in line[-1].split(",")]
    return any(option in {"huge=always", "huge=within_size"} for option in options)

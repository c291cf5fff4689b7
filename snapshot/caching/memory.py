"""Puts files into large pages of memory: into a tmpfs that it mounts, if it may, or in the page cache.

A fetch into new memory waits mostly for page faults, one for each page of 4 KiB. With pages of 2 MiB the same
bytes are received faster, and mapping them causes a five-hundredth of the faults (docs/snapshot-choices.md).
/dev/shm has small pages unless it is mounted otherwise, and only root may mount. Other users get a plain
folder in /dev/shm; for huge pages there, an administrator runs `mount -o remount,huge=within_size /dev/shm`.

The page cache holds a file that was copied or downloaded in small pages, until it is read anew from the disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ...machine import memory_bytes
from ..format.manifest import Manifest
from ..sources.folder import FolderSource

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  a private folder is made below it
LEFT_AFTER_S = 3600.0
"""An empty mounted root that was unchanged for this long was left by a process that was killed."""
SLACK_BYTES = 16 << 20
"""Size of the mount beyond the budget, for manifests, locks and rounding, which no budget includes."""

CACHED_SHARE = 0.25
"""Larger snapshots are not read anew: that would push other files out of the page cache."""

PIECE_BYTES = 2 << 20
"""The largest page of the page cache. A file is read anew only where its pages are small, in pieces of this size."""
MOST_FAULTS = 8
"""Mapping a piece takes one page fault if it is a large page. In pages of 4 KiB, it takes 32: the kernel maps 16 per fault."""

# Flags from <sys/mount.h>. No file on this file system is a program or a device.
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_UMOUNT_NOFOLLOW = 8
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prepare(root: Path, size_bytes: int) -> bool:
    """Make folder `root` if it is absent, with huge pages if possible. Return `is_ours(root)`."""
    if not root.parent.is_dir() or not os.access(root.parent, os.W_OK):
        return False
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
        mount(root, size_bytes + SLACK_BYTES)
    return is_ours(root)


def is_ours(root: Path) -> bool:
    """Return True if folder `root` belongs to this user and no other user has access to it."""
    # Any user can make a folder of this name in shared memory.
    with suppress(OSError):
        status = root.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return False


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount a tmpfs with huge pages on `folder`. Return True if that was allowed."""
    # within_size: the kernel uses a huge page only if the file fills the page, so a file takes no memory beyond its size.
    options = f"huge=within_size,mode=0700,size={size_bytes}".encode()
    flags = _NOSUID | _NODEV | _NOEXEC
    return bool(_libc.mount(b"pilotflame", os.fsencode(folder), b"tmpfs", flags, options) == 0)


def unmount(folder: Path) -> bool:
    """Unmount `folder`, which deletes all files in it. Return False if it is not mounted or is in use."""
    return bool(_libc.umount2(os.fsencode(folder), _UMOUNT_NOFOLLOW) == 0)


def give_back(root: Path) -> None:
    """Unmount and remove `root` if it is empty. Only one process at a time may call this or `prepare`."""
    with suppress(OSError):
        if root.is_mount() and not any(root.iterdir()):
            unmount(root)
        root.rmdir()


def sweep(roots: Iterable[Path], own: Path) -> None:
    """Unmount and remove empty mounted `roots` that killed processes left, except `own` and those in use."""
    # A root that changed recently may have just been made by another process.
    before_s = time.time() - LEFT_AFTER_S
    for root in roots:
        # Another process may remove it at the same time.
        with suppress(OSError):
            status = root.lstat()
            # A folder that is not mounted here may be mounted, and in use, in another mount namespace. The kernel would
            # unmount it there if it were removed here.
            old = root.is_mount() and max(status.st_mtime, status.st_ctime) < before_s
            if root != own and is_ours(root) and old:
                give_back(root)


def has_huge_pages(folder: Path) -> bool:
    """Return True if the mount options of the file system that holds `folder` give its files huge pages."""
    device = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    # A fetch waits for this, and there may be many mounts. So split only the lines that contain the device.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    lines = (line.split() for line in mounts if f" {device} " in line)
    options = [option for line in lines if line[2] == device for option in line[-1].split(",")]
    return any(option in {"huge=always", "huge=within_size"} for option in options)


def enlarge_cached_pages(root: Path, manifest: Manifest) -> int:
    """Read the shards into the page cache in large pages, if possible. Return the faults to map them whole.

    A worker that maps the weights of MiniLM then needs 0.2 ms for their pages instead of 5. This takes no
    memory beyond that of the cached file. Shards that other processes map stay as they are, and all do if
    together they exceed a quarter of the memory, or if the file system caches files in small pages only.
    """
    if manifest.total_bytes > CACHED_SHARE * memory_bytes():
        return 0
    source = FolderSource(root)
    return sum(_enlarge(source, shard.name) for shard in manifest.shards)


def _enlarge(source: FolderSource, name: str) -> int:
    descriptor = source.open(name)
    try:
        faults = _map(descriptor, range(0, os.fstat(descriptor).st_size, PIECE_BYTES))
        small = [begin for begin, count in faults.items() if count > MOST_FAULTS]
        if small:
            # Only clean pages can be dropped.
            os.fsync(descriptor)
            for begin in small:
                os.posix_fadvise(descriptor, begin, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
            faults |= _map(descriptor, small)
        return sum(faults.values())
    finally:
        os.close(descriptor)


def _map(descriptor: int, pieces: Iterable[int]) -> dict[int, int]:
    """Map the pieces of an open file that begin at `pieces`. Return how many faults each of them took."""
    try:
        # All of it: it may have another size by now.
        whole = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError:
        # It is empty.
        return {}
    with whole as memory:
        address, size_bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        read = bytearray(PIECE_BYTES)
        # A kernel that does not know an advice leaves the pages as they are.
        _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
        found = {}
        for begin in (piece for piece in pieces if piece < size_bytes):
            before = _faults()
            _libc.madvise(address + begin, min(PIECE_BYTES, size_bytes - begin), _MADV_POPULATE_READ)
            found[begin] = _faults() - before
            # On a virtual machine, pages that the disk has written are not mapped for the processors yet. Reading maps them
            # now, so that a worker need not wait for that at its first request. Do not read from `memory`: if the file were
            # truncated meanwhile, the read would end this process with SIGBUS.
            os.preadv(descriptor, [read], begin)
        return found


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_minflt + used.ru_majflt

"""Puts files into large pages of memory: in a tmpfs, which it mounts if the process may mount, or in the page cache.

A fetch into new memory waits mostly for page faults, one for each page of 4 KiB. With pages of 2 MiB the same
bytes are received faster, and mapping them causes a five-hundredth of the faults (docs/decisions.md).
By default, /dev/shm has small pages. Only root may mount a tmpfs, and other users get a plain folder in /dev/shm. To
give that folder huge pages, an administrator runs `mount -o remount,huge=within_size /dev/shm`.

The page cache holds a copied or downloaded file in small pages, until the file is read anew from the disk.
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
"""After this time without a change, an empty mounted root counts as left by a killed process."""
SLACK_BYTES = 16 << 20
"""How much larger the mount is than the budget, which does not include manifests, locks and rounding."""

CACHED_SHARE = 0.25
"""A snapshot larger than this share of the memory is not read anew: its pages would evict other files from the page cache."""

PIECE_BYTES = 2 << 20
"""The largest page of the page cache. A file is read anew only where its pages are small, in pieces of this size."""
MOST_FAULTS = 8
"""If mapping a piece takes more page faults than this, the piece is in small pages. A piece that is one large page
takes one fault. In pages of 4 KiB a piece takes 32 faults, because the kernel maps 16 pages per fault."""

# Flags from <sys/mount.h>. No file on this file system is a program or a device.
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_UMOUNT_NOFOLLOW = 8
_MADV_HUGEPAGE, _MADV_POPULATE_READ = 14, 22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def prepare(root: Path, size_bytes: int) -> bool:
    """Make folder `root` if it is absent, with huge pages if possible. Return what `is_ours` returns for it."""
    if not root.parent.is_dir() or not os.access(root.parent, os.W_OK):
        return False
    with suppress(FileExistsError):
        root.mkdir(mode=0o700)
        mount(root, size_bytes + SLACK_BYTES)
    return is_ours(root)


def is_ours(root: Path) -> bool:
    """Return True if folder `root` belongs to this user and no other user has access to it."""
    # Check the owner, because any user can make a folder of this name in shared memory.
    with suppress(OSError):
        status = root.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return False


def mount(folder: Path, size_bytes: int) -> bool:
    """Mount a tmpfs with huge pages on `folder`. Return True if that was allowed."""
    # With within_size, the kernel uses a huge page only if the file fills it. So no memory is wasted at a file's end.
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
    """Unmount and remove empty mounted `roots` that killed processes left, except `own` and roots in use."""
    # Keep a root that changed recently: another process may just have made it.
    before_s = time.time() - LEFT_AFTER_S
    for root in roots:
        # An OSError means that another process removes the root at the same time.
        with suppress(OSError):
            status = root.lstat()
            # Only remove a root that is mounted here. Another root may be mounted, and in use, in another mount
            # namespace. If it were removed here, the kernel would unmount it there.
            old = root.is_mount() and max(status.st_mtime, status.st_ctime) < before_s
            if root != own and is_ours(root) and old:
                give_back(root)


def has_huge_pages(folder: Path) -> bool:
    """Return True if the mount options of the file system that holds `folder` give its files huge pages."""
    device = f"{os.major(folder.stat().st_dev)}:{os.minor(folder.stat().st_dev)}"
    # A fetch waits for this function, and there may be many mounts. So split only the lines that contain the device.
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    lines = (line.split() for line in mounts if f" {device} " in line)
    options = [option for line in lines if line[2] == device for option in line[-1].split(",")]
    return any(option in {"huge=always", "huge=within_size"} for option in options)


def enlarge_cached_pages(root: Path, manifest: Manifest) -> int:
    """Read the shards into the page cache in large pages, if possible. Return how many page faults it takes to map all shards.

    A worker that maps the weights of MiniLM then needs 0.2 ms for their pages instead of 5 ms. The page cache takes no
    more memory than before. Shards that other processes map stay in small pages. All shards stay in small pages if they
    have more than a quarter of the memory in total, or if the file system caches files in small pages only.
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
            # Sync first, because the kernel drops only clean pages.
            os.fsync(descriptor)
            for begin in small:
                os.posix_fadvise(descriptor, begin, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
            faults |= _map(descriptor, small)
        return sum(faults.values())
    finally:
        os.close(descriptor)


def _map(descriptor: int, pieces: Iterable[int]) -> dict[int, int]:
    """Map the pieces of an open file that begin at `pieces`. Return the number of page faults for each piece."""
    try:
        # Map the whole file, because its size may have changed.
        whole = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except ValueError:
        # The file is empty.
        return {}
    with whole as memory:
        address, size_bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        read = bytearray(PIECE_BYTES)
        # A kernel that does not know this advice leaves the pages as they are.
        _libc.madvise(address, size_bytes, _MADV_HUGEPAGE)
        found = {}
        for begin in (piece for piece in pieces if piece < size_bytes):
            before = _faults()
            _libc.madvise(address + begin, min(PIECE_BYTES, size_bytes - begin), _MADV_POPULATE_READ)
            found[begin] = _faults() - before
            # On a virtual machine, pages that the disk has just written are not mapped for the processors yet. The read
            # maps them now, so that no worker waits for the mapping at its first request. Do not read from `memory`: if
            # the file were truncated meanwhile, the read would end this process with SIGBUS.
            os.preadv(descriptor, [read], begin)
        return found


def _faults() -> int:
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_minflt + used.ru_majflt

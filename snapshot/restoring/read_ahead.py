"""Reads weights that lie on a disk into the page cache, in the order in which a forward pass touches them.

Operations run meanwhile. An operation that touches a missing page waits for the page in a page fault, with or without
this module. But page faults alone would read only while an operation waits, and only the pages around its access. This
module reads whole chunks. docs/decisions.md has the measurements. No weights are copied to the memory tier, because the page
cache has the same pages, and the kernel frees them when it needs memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from ...errors import SnapshotError
from ...machine import memory_bytes
from ..fetching.ranges import Chunks, Range, wanted_order
from ..format.manifest import Manifest
from ..sources.folder import FolderSource

SAMPLES = 8
"""How many pages are checked to find out whether the weights are in memory. Every cold start waits for these checks."""
THREADS = 2
MEMORY_SHARE = 0.5
"""The share of the machine's memory that is filled. Reading more ahead would evict pages that were not used yet."""

# Without MAP_NORESERVE (0x4000), the kernel refuses a writable private mapping that is larger than the memory. The
# mapping is only read.
_FLAGS, _PROTECTION = mmap.MAP_PRIVATE | 0x4000, mmap.PROT_READ | mmap.PROT_WRITE
_MADV_POPULATE_READ = 22
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


def in_memory(manifest: Manifest, flats: Sequence[Tensor]) -> bool:
    """Return True if all sampled pages of the mapped shards `flats` are in memory."""
    present = ctypes.create_string_buffer(1)
    step = max(mmap.PAGESIZE, manifest.needed_bytes // SAMPLES)
    for shard, flat in enumerate(flats):
        address = flat.data_ptr()
        for offset in _samples(manifest.needed_extents(shard), step):
            failed = _libc.mincore((address + offset) & -mmap.PAGESIZE, 1, present)
            if not failed and present.raw == b"\0":
                return False
    return True


def _samples(extents: Sequence[tuple[int, int]], step: int) -> Iterator[int]:
    """Yield the first offset in these ranges of bytes, then an offset after every `step` bytes. Do not count the gaps between the ranges."""
    before = 0
    for begin, end in extents:
        yield from range(begin + before, end, step)
        before = (before - (end - begin)) % step


class ReadAhead:
    """Threads that read the shards into the page cache, until all are read or MEMORY_SHARE of the memory is filled.

    An error ends a thread and is not reported, because an operation that reads the same bytes meets the same error.
    The threads keep a reference to `keep`.
    """

    def __init__(self, root: Path, manifest: Manifest, *, keep: object = None) -> None:
        self._source, self._shards, self._keep = FolderSource(root), manifest.shards, keep
        self._pieces = pieces(manifest, int(MEMORY_SHARE * memory_bytes()))
        self._lock = threading.Lock()
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="snapshot-read-ahead", daemon=True).start()

    def _run(self) -> None:
        mapped: dict[int, mmap.mmap] = {}
        # mmap raises ValueError if a file has become empty.
        with suppress(SnapshotError, OSError, ValueError):
            while (piece := self._next()) is not None:
                memory = mapped.get(piece.shard)
                if memory is None:
                    memory = mapped[piece.shard] = self._map(self._shards[piece.shard].name)
                _advise(memory, piece.begin, min(piece.end, len(memory)), _MADV_POPULATE_READ)

    def _next(self) -> Range | None:
        with self._lock:
            return next(self._pieces, None)

    def _map(self, name: str) -> mmap.mmap:
        """Map a shard a second time, so that the page tables of the mapping that tensors view stay small."""
        descriptor = self._source.open(name)
        try:
            memory = mmap.mmap(descriptor, 0, flags=_FLAGS, prot=_PROTECTION)
        finally:
            os.close(descriptor)
        return memory


def pieces(manifest: Manifest, limit_bytes: int) -> Iterator[Range]:
    """Yield chunks in the order of first touch, as long as they have at most `limit_bytes` together."""
    chunks, left_bytes = Chunks(manifest), limit_bytes
    for extent in map(chunks.extent, wanted_order(manifest)):
        left_bytes -= extent.end - extent.begin
        if left_bytes < 0:
            return
        yield extent


def _advise(memory: mmap.mmap, begin: int, end: int, advice: int) -> None:
    # Call madvise of the C library: memory.madvise would block all threads of the interpreter while the disk is read.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _libc.madvise(address + begin, max(0, end - begin), advice)

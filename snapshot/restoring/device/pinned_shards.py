"""Pins the shards of a snapshot before a copy, so that the device copies directly from the page cache, without a buffer.

A standby does this after its rehearsal. Pinned pages cannot be evicted. So shards are pinned only if they are already in
memory, and only as long as all processes of the machine together pin at most PINNED_SHARE of the memory. Shards stay
pinned until the process ends or the snapshot is garbage-collected.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ....errors import SnapshotError
from ....machine import memory_bytes
from ...format.manifest import Manifest, Shard
from ..read_ahead import in_memory
from .slab import Segment, SlabPiece

if TYPE_CHECKING:
    from .device import Device

PINNED_SHARE = 0.25
WINDOW_BYTES = 64 << 20
"""The bytes of a shard that one call pins. A call of the function that arrives meanwhile waits for the end of one window."""
CHECKED_BYTES = 8 << 20
"""After a window of at least this size is pinned, the count of pinned bytes must be higher. The count of a smaller window is
not checked, because the kernel may count about 100 pages late."""
MOST_PARTS = 4
"""A piece of more parts is gathered in a buffer instead, because each part would be a copy of its own."""

WindowPart = tuple[Tensor, int]
"""Bytes of a shard that lie in one window, and their offset in the piece."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class PinnedShards:
    """The shards of a snapshot, in a second mapping, and their pinned windows."""

    def __init__(self, device: Device, flats: Sequence[Tensor]) -> None:
        """`flats` are the shards, mapped by `map_shared`."""
        self._device, self._flats = device, flats
        self._pinned = [[False] * -(-len(flat) // WINDOW_BYTES) for flat in flats]
        self._memories: list[Tensor] = []
        # Do not unpin at the end of the process: the kernel does it.
        weakref.finalize(self, _unpin, device, self._memories).atexit = False

    def pin(self, pieces: Sequence[SlabPiece], stop: Callable[[], bool] = lambda: False) -> None:
        """Pin the windows that `pieces` need, in their order. End early if `stop` returns True, or if no more may be pinned."""
        for piece in pieces:
            if self.divided(piece) is None:
                continue
            for shard, window in _windows(piece):
                if not self._pinned[shard][window] and (stop() or not self._pin(shard, window)):
                    return

    def _pin(self, shard: int, window: int) -> bool:
        memory = self._flats[shard][window * WINDOW_BYTES : (window + 1) * WINDOW_BYTES]
        before_bytes = self._device.pinned_bytes()
        if before_bytes + memory.nbytes > PINNED_SHARE * memory_bytes() or not self._device.pin(memory):
            return False
        counted = self._device.pinned_bytes() >= before_bytes + memory.nbytes // 2
        if memory.nbytes >= CHECKED_BYTES and not counted:
            # Pin nothing if the kernel does not count these pages, because the limit would have no effect.
            self._device.unpin(memory)
            return False
        self._memories.append(memory)
        self._pinned[shard][window] = True
        # Remove the pages from the page table of this process. They stay pinned. In the table, they would count as memory
        # of the process, and the kernel would walk them whenever it measures the process, and when the process ends.
        _libc.madvise(memory.data_ptr(), memory.nbytes, mmap.MADV_DONTNEED)
        return True

    def parts(self, piece: SlabPiece) -> list[WindowPart] | None:
        """Return the bytes of a piece. None if some of them are not pinned, or if they consist of too many parts."""
        pinned = all(self._pinned[shard][window] for shard, window in _windows(piece))
        return self.divided(piece) if pinned else None

    def divided(self, piece: SlabPiece) -> list[WindowPart] | None:
        """Return the bytes of a piece, pinned or not. None if they consist of too many parts."""
        found = list[WindowPart]()
        for segment in piece.segments:
            if segment.step or len(found) > MOST_PARTS:
                return None
            found += self._within_windows(segment)
        return found if len(found) <= MOST_PARTS else None

    def _within_windows(self, segment: Segment) -> Iterator[WindowPart]:
        """Divide a segment at the bounds of windows, because a copy cannot read from two windows. Yield the parts."""
        flat = self._flats[segment.shard]
        for window in _windows_of(segment):
            begin = max(segment.begin, window * WINDOW_BYTES)
            end = min(segment.end, (window + 1) * WINDOW_BYTES)
            yield flat[begin:end], segment.at + begin - segment.begin


def shards_to_pin(device: Device, manifest: Manifest, opened: Callable[[str], int]) -> PinnedShards | None:
    """Map the shards, which `opened` opens by name. Return None if the shards are not in memory, or cannot be opened."""
    try:
        flats = [_mapped(shard, opened) for shard in manifest.shards]
    except (SnapshotError, OSError):
        # Ignore the error: the upload reads the same files, and reports it.
        return None
    return PinnedShards(device, flats) if in_memory(manifest, flats) else None


def _mapped(shard: Shard, opened: Callable[[str], int]) -> Tensor:
    if not shard.size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    descriptor = opened(shard.name)
    try:
        if os.fstat(descriptor).st_size != shard.size_bytes:
            raise SnapshotError(f"Shard {shard.name} was replaced or written to.")
        return map_shared(descriptor, shard.size_bytes)
    finally:
        os.close(descriptor)


def map_shared(descriptor: int, size_bytes: int) -> Tensor:
    """Map a file read-only, as bytes that `Device.pin` can pin. Nothing may write to the tensor."""
    # Use a shared mapping, because pages of a private mapping would be copied before they are pinned. Call mmap of the C
    # library, because Python's mmap object of a read-only file has no address that torch accepts.
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Unmap the file when the tensor, which refers to `memory`, is freed.
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8)


def _windows(piece: SlabPiece) -> list[tuple[int, int]]:
    """Return the shard and the number of each window that a piece needs."""
    return [(one.shard, window) for one in piece.segments for window in _windows_of(one)]


def _windows_of(segment: Segment) -> range:
    return range(segment.begin // WINDOW_BYTES, -(-segment.end // WINDOW_BYTES))


def _unpin(device: Device, memories: list[Tensor]) -> None:
    for memory in memories:
        device.unpin(memory)

"""Maps the shards of a snapshot into memory: private, copied on write, and paged in on first access."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ...errors import SnapshotChanged, SnapshotError
from ..fetching.arrival import Arrival
from ..format.compared import ComparedShards
from ..format.manifest import Manifest, Shard
from ..sources.folder import FolderSource
from .read_ahead import ReadAhead, in_memory

# Python's mmap module has this constant since 3.13. Without the flag, the kernel's heuristic refuses a writable private
# mapping that is larger than the memory, although hardly any of its pages are ever written.
_MAP_NORESERVE = 0x4000
_FLAGS, _PROTECTION = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
# Python's mmap takes no address, so `_map_over` calls mmap of the C library.
_MAP_FIXED = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """The mapped shards of a snapshot. There is nothing to close: a shard stays mapped while tensors use it.

    MAP_POPULATE is not used, because on a private writable mapping it copies every page (55-80 ms for 90 MB).
    MADV_POPULATE_READ is not used, because it saves no time: the kernel maps 16 pages at each fault anyway.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        compared: ComparedShards | None = None,
        *,
        keep: object = None,
        arrival: Arrival | None = None,
    ) -> None:
        """Map the shards in folder `root`.

        Raise SnapshotChanged if a shard is missing or has another size or, with `compared`, if it does not have the bytes of
        the manifest. The mapping keeps a reference to `keep`, such as a lease, as long as
        any shard is mapped. With `arrival`, bytes may still be arriving: call `wait` before reading them. Until a chunk
        has landed, its bytes read as zeros.
        """
        self.manifest = manifest
        self.arrival = arrival
        self.root = root
        self._compared = compared
        # The open files of a snapshot outside a cache. `check` and `opened` use them, even if other files now have their names.
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        memories = [self._map(number, keep) for number in range(len(manifest.shards))]
        self.flats = [_flat(memory) for memory in memories]
        """Each shard as a one-dimensional tensor of uint8."""
        if arrival is not None and not arrival.complete:
            arrival.attach(_Veil(root, arrival, manifest.shards, memories))

    def wait(self, shard: int, begin: int, end: int) -> None:
        """Block until bytes [begin, end) of a shard have landed. Raise the errors of Arrival.wait."""
        if self.arrival is not None and begin < end:
            self.arrival.wait(*self.arrival.chunks.covering(shard, begin, end))

    def check(self) -> None:
        """Raise SnapshotChanged if a mapped file was written to, and does not have the bytes of the manifest any more."""
        if self._compared is not None:
            for shard, descriptor in self._descriptors.items():
                self._compared.compare(self.manifest.shards[shard].name, descriptor)

    def opened(self, shard: int) -> int:
        """Return a new descriptor of the mapped file of a shard. Call this only for a snapshot outside a cache."""
        return os.dup(self._descriptors[shard])

    def _map(self, number: int, keep: object) -> _Memory | None:
        shard = self.manifest.shards[number]
        try:
            descriptor = (self._compared or FolderSource(self.root)).open(shard.name)
        except SnapshotChanged:
            raise
        except SnapshotError as error:
            raise SnapshotChanged(error.message, remedy=error.remedy) from error
        if self.arrival is None:
            self._descriptors[number] = descriptor
        try:
            size_bytes = os.fstat(descriptor).st_size
            if size_bytes != shard.size_bytes:
                fault = f"Shard {shard.name} has {size_bytes} bytes, {shard.size_bytes} expected."
                raise SnapshotChanged(fault, remedy="Fetch it again, or make the manifest anew.")
            if not size_bytes:
                return None
            memory = _Memory(descriptor, size_bytes, flags=_FLAGS, prot=_PROTECTION)
            memory.keep = keep
            return memory
        finally:
            if self.arrival is not None:
                os.close(descriptor)

    def read_ahead(self) -> None:
        """Start threads that read all shards from the disk, unless the shards are in memory already."""
        if not in_memory(self.manifest, self.flats):
            ReadAhead(self.root, self.manifest, keep=self.flats)


class _Memory(mmap.mmap):
    """A mapped shard. Its tensors refer to this object. So `keep`, which protects the file, lives as long as the tensors."""

    keep: object = None


class _Veil:
    """Shows readers of a mapped shard the chunks that have landed, and zeros in place of missing chunks.

    The file of a shard may still have bytes of another snapshot (see `caching.space`). So until a chunk has landed,
    pages of zeros are mapped over its bytes. A reader that does not wait sees zeros, never bytes of other weights. To
    show a chunk takes one call of mmap, a few microseconds.
    """

    def __init__(
        self, root: Path, arrival: Arrival, shards: Sequence[Shard], memories: Sequence[_Memory | None]
    ) -> None:
        """`memories` are the `shards`, mapped whole, with None for an empty shard. No thread may read them yet."""
        self._root, self._chunks, self._shards = root, arrival.chunks, shards
        # Use weak references to avoid a cycle: a memory refers to the lease, which refers to `arrival`, which refers to this
        # object.
        self._memories = [memory if memory is None else weakref.ref(memory) for memory in memories]
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close_all, self._descriptors).atexit = False
        for memory in memories:
            if memory is not None:
                _map_over(memory, 0, len(memory), -1)

    def move(self, root: Path) -> None:
        _close_all(self._descriptors)
        self._root = root

    def show(self, chunk: int) -> None:
        extent = self._chunks.extent(chunk)
        reference = self._memories[extent.shard]
        memory = reference() if reference is not None else None
        if memory is None:
            return
        descriptor = self._descriptors.get(extent.shard)
        if descriptor is None:
            descriptor = FolderSource(self._root).open(self._shards[extent.shard].name)
            self._descriptors[extent.shard] = descriptor
        _map_over(memory, extent.begin, extent.end, descriptor)


def _close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _map_over(memory: _Memory, begin: int, end: int, descriptor: int) -> None:
    """Map bytes [begin, end) of the file `descriptor` over the same bytes of `memory`. Map zeros if `descriptor` is -1.

    `begin` must be a multiple of the page size.
    """
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    flags = _FLAGS | _MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    offset = 0 if descriptor < 0 else begin
    if _libc.mmap(base + begin, end - begin, _PROTECTION, flags, descriptor, offset) == _MAP_FAILED:
        fault = f"Weights that have arrived cannot be mapped: {os.strerror(ctypes.get_errno())}."
        raise SnapshotError(fault, remedy="See vm.max_map_count and the limits of memory of this process.")


def _flat(memory: _Memory | None) -> torch.Tensor:
    # An empty shard is not mapped, because neither mmap nor frombuffer accepts a size of zero.
    if memory is None:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8)

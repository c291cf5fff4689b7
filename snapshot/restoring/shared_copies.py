"""Memory for tensors that cannot be views of mapped files. The first worker fills it, and all workers of a zygote map it.

A tensor is copied if its type in the module differs from its type in the file, or if its bytes are not aligned for their type. The zygote creates the memory
together with the plan. The memory then has no pages. The first worker that restores fills the memory and seals it, so that nothing
can write to it any more. Each worker has a private copy-on-write mapping, like the mapping of a file. The memory is freed when the
zygote and its workers have ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch

# `descriptors.STATELESS` lists this name, because forks may share the memory.
NAME = "pilotflame-weights"
_ALIGN_BYTES = 64
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedCopies:
    """Memory for tensors that is filled once. Processes that are forked after this object was made share the memory."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """`sizes` are the sizes of the tensors in bytes."""
        self.offsets, self.size_bytes = [], 0
        for size in sizes:
            self.offsets.append(self.size_bytes)
            self.size_bytes += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        self._file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, max(1, self.size_bytes))

    def mapped(self, fill: Callable[[torch.Tensor], None]) -> torch.UntypedStorage:
        """Return a private mapping of the memory. If no process has filled the memory yet, first call `fill` with its bytes.

        Block while another process fills the memory. If that process dies, this process fills the memory.
        """
        # Open the file again: a lock belongs to an open file, and forks share the open file `_file`.
        lock = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not fcntl.fcntl(self._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                memory = mmap.mmap(self._file, 0)
                fill(torch.frombuffer(memory, dtype=torch.uint8))
                # Unmap the memory, because memory with a writable mapping cannot be sealed.
                memory.close()
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            os.close(lock)
        private = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(private, dtype=torch.uint8).untyped_storage()

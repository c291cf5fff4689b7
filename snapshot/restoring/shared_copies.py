"""Memory for the tensors that cannot be views of mapped files. The first worker fills the memory, and all workers of its zygote map it.

A tensor is copied if the module has another type, or if its bytes are not aligned for their type. The zygote makes a plan, and with it
the memory, without a page. The first worker that restores fills it and seals it: nothing can write to it from then on. The
mapping of each worker is private and copy-on-write, as that of a file. The memory is free when the zygote and its workers have ended.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch

# `descriptors.STATELESS` has the beginning of this name: forks may share the memory.
NAME = "pilotflame-weights"
_ALIGN_BYTES = 64
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SharedCopies:
    """Tensors in memory that is filled once. Processes that are forked after it was made share it."""

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
        """Return the memory, whose changes stay in this process. `fill` gets its bytes, unless a process has filled it.

        Blocks while another process fills it. If that process dies, this one fills it.
        """
        # A lock belongs to an open file. Forks share `_file`, so open it again.
        lock = os.open(f"/proc/self/fd/{self._file}", os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not fcntl.fcntl(self._file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                memory = mmap.mmap(self._file, 0)
                fill(torch.frombuffer(memory, dtype=torch.uint8))
                # Memory with a mapping that can be written to cannot be sealed.
                memory.close()
                fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        finally:
            os.close(lock)
        private = mmap.mmap(self._file, 0, flags=mmap.MAP_PRIVATE)
        return torch.frombuffer(private, dtype=torch.uint8).untyped_storage()

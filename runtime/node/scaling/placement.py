"""Places workers on the GPUs of a node, within the memory of each. It does no I/O and reads no clock.

In this module, a GPU is a whole device or a part of a device, such as a MIG slice. Only its memory limits the number of
workers. Sizes are in MiB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from ...ground.settings.resources import Resources

MemoryByGpu: TypeAlias = Mapping[str, int]
"""MiB of memory of each GPU, by the GPU's id."""


class Gpu(NamedTuple):
    """A GPU of the node, or a slice of one."""

    id: str
    """As the driver's environment variable names it: "0", "GPU-4e2b…" or "MIG-91fa…"."""
    memory_mb: int

    @property
    def slice(self) -> bool:
        """True if it is a MIG slice. A process that uses a MIG slice can use no other GPU or slice."""
        return self.id.startswith("MIG-")


class GpuNeed(NamedTuple):
    """The GPUs that each worker of a function needs."""

    gpus: int
    memory_mb: int | None
    """The memory that it needs of each GPU; None for the whole GPU."""

    def of(self, gpu: Gpu) -> int:
        return gpu.memory_mb if self.memory_mb is None else self.memory_mb


def need_of(resources: Resources) -> GpuNeed | None:
    """Return the GPUs that each worker of a function needs; None if it needs no GPU."""
    return GpuNeed(resources.gpus, resources.gpu_memory_mb) if resources.gpus else None


def candidates(gpus: Iterable[Gpu], need: GpuNeed) -> list[Gpu]:
    """Return the GPUs that one worker could use on an empty node. A worker with several GPUs can use no MIG slices."""
    return [gpu for gpu in gpus if gpu.memory_mb >= need.of(gpu) and not (gpu.slice and need.gpus > 1)]


def place(gpus: Sequence[Gpu], held: Iterable[MemoryByGpu], need: GpuNeed) -> MemoryByGpu | None:
    """Return the memory for one more worker; None if there is no room.

    Choose the GPUs on which the least memory stays free (best fit), so that other GPUs keep enough for large workers.
    """
    free = _free(gpus, held)
    fitting = [gpu for gpu in candidates(gpus, need) if free[gpu.id] >= need.of(gpu)]
    if len(fitting) < need.gpus:
        return None
    fitting.sort(key=lambda gpu: free[gpu.id] - need.of(gpu))
    return {gpu.id: need.of(gpu) for gpu in fitting[: need.gpus]}


def fit(gpus: Sequence[Gpu], held: Iterable[MemoryByGpu]) -> bool:
    """Return True if the GPUs have room for `held` together."""
    return all(free_mb >= 0 for free_mb in _free(gpus, held).values())


def _free(gpus: Sequence[Gpu], held: Iterable[MemoryByGpu]) -> Counter[str]:
    free = Counter({gpu.id: gpu.memory_mb for gpu in gpus})
    for one in held:
        free.subtract(one)
    return free

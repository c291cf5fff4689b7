"""Reads the state of NVIDIA's GPUs through NVML, which needs the package nvidia-ml-py and NVIDIA's driver."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from .gpu_driver import GpuDriver, GpuUse, warn

# With NVIDIA's MPS, the driver lets a process allocate at most the memory that this variable names.
MPS_MEMORY = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"


class NvidiaDriver(GpuDriver):
    library = "NVML"
    package = "nvidia-ml-py"
    visible = "CUDA_VISIBLE_DEVICES"
    cdi_kind = "nvidia.com/gpu"

    def uses(self) -> list[GpuUse]:
        with _opened() as nvml:
            return list(_uses(nvml)) if nvml is not None else []

    def held_by(self, pid: int) -> Mapping[str, int]:
        found = dict[str, int]()
        with _opened() as nvml:
            for _, part, _ in _parts(nvml) if nvml is not None else ():
                with contextlib.suppress(nvml.NVMLError):
                    if (held := _held(nvml, part, pid)) is not None:
                        found[nvml.nvmlDeviceGetUUID(part)] = held
        return found

    def environment(self, ids: Sequence[str], memory_mb: int | None) -> dict[str, str]:
        found = {self.visible: ",".join(ids)}
        if ids and memory_mb is not None:
            # Each limit names a GPU by its number among the GPUs that the worker sees. Without MPS, the driver ignores
            # the variable.
            found[MPS_MEMORY] = ",".join(f"{number}={memory_mb}M" for number in range(len(ids)))
        return found


@contextlib.contextmanager
def _opened() -> Iterator[Any]:
    """Yield the initialised NVML; None if the package or the driver is missing."""
    nvml: ModuleType | Any = None
    with contextlib.suppress(ImportError):
        nvml = importlib.import_module("pynvml")
    if nvml is None:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if not isinstance(error, nvml.NVMLError_LibraryNotFound):
            warn(f"NVML does not tell which GPUs there are: {error}")
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _parts(nvml: ModuleType) -> Iterator[tuple[int, Any, bool]]:
    """Yield each GPU. If a GPU is cut into slices, yield each of its slices instead. Each comes as the GPU's number, a
    handle, and True for a whole GPU.
    """
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
        except nvml.NVMLError as error:
            warn(f"NVML does not give access to GPU {number}, which is left out: {error}")
            continue
        slices = list(_slices(nvml, gpu))
        yield from ((number, one, False) for one in slices)
        if not slices:
            yield number, gpu, True


def _uses(nvml: ModuleType) -> Iterator[GpuUse]:
    for number, part, whole in _parts(nvml):
        try:
            yield _use(nvml, number, part, busy=whole)
        except nvml.NVMLError as error:
            warn(f"NVML does not tell the memory of GPU {number}, which is left out: {error}")


def _slices(nvml: ModuleType, gpu: Any) -> Iterator[Any]:
    """Yield the MIG slices of a GPU."""
    # NVMLError: most GPUs have no MIG. NVMLError_NotFound: with MIG, most places for a slice are empty.
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(gpu)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)


def _use(nvml: ModuleType, number: int, gpu: Any, *, busy: bool) -> GpuUse:
    allocatable, used = _memory(nvml, gpu)
    share = None
    if busy:
        with contextlib.suppress(nvml.NVMLError):
            share = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    return GpuUse(nvml.nvmlDeviceGetUUID(gpu), number, nvml.nvmlDeviceGetName(gpu), allocatable, used, share)


def _memory(nvml: ModuleType, gpu: Any) -> tuple[int, int]:
    """Return the bytes of a GPU that processes may use, and the bytes that they use now. An old driver does not report
    the bytes that it reserves.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
    except nvml.NVMLError_FunctionNotFound:
        memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
        return memory.total, memory.used
    return memory.total - memory.reserved, memory.used


def _held(nvml: ModuleType, gpu: Any, pid: int) -> int | None:
    """Return how many bytes of a GPU a process holds; None if it does not use the GPU, or if NVML does not know."""
    processes = nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    return next((one.usedGpuMemory for one in processes if one.pid == pid), None)

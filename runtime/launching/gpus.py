"""Finds the GPUs of this machine, and how much of them is used. In the gateway, this is the only module that knows NVML.

It needs the package nvidia-ml-py and NVIDIA's driver. Without them, the setting `gpus` says which GPUs there are.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from ..link.worker_spec import VISIBLE_GPUS
from ..scaling.placement import Gpu

LOG = logging.getLogger("pilotflame")
# Every base has it: torch then asks the driver's library whether there are GPUs, and does not make a context to find out,
# which no fork would survive.
ASK_WITHOUT_USE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_MIB = 1 << 20


class GpuUse(NamedTuple):
    """How much of a GPU, or of a slice of one, all processes of the machine use."""

    id: str
    number: int
    """Of the GPU, in NVML's order."""
    name: str
    memory_bytes: int
    used_bytes: int
    busy_share: float | None
    """The share of the last second in which it ran something; None for a slice, of which that is not known."""

    def is_named(self, text: str) -> bool:
        """Return True if an entry of CUDA_VISIBLE_DEVICES means this one: by its number, or the first part of its id."""
        return text == str(self.number) if text.isdecimal() else self.id.startswith(text)


def find_gpus() -> list[Gpu]:
    """Return the GPUs of this machine that the gateway sees. Of one that is cut into MIG slices, return those."""
    seen = os.environ.get(VISIBLE_GPUS)
    names = None if seen is None else [text.strip() for text in seen.split(",") if text.strip()]
    return [
        Gpu(one.id, one.memory_bytes // _MIB)
        for one in gpu_uses()
        if names is None or any(one.is_named(name) for name in names)
    ]


def gpu_uses() -> list[GpuUse]:
    """Return how much of each GPU is used, in their order; an empty list if there are none, or NVML is not there."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return []
    with _initialised(nvml) as there:
        return list(_uses(nvml)) if there else []


def names_within(given: Sequence[str], ids: Iterable[str]) -> list[str]:
    """Return the names of GPUs in a container, which counts the GPUs that it is `given` from 0. It knows ids that are no numbers too."""
    numbers = sorted(int(one) for one in given if one.isdecimal())
    return [str(numbers.index(int(one))) if one.isdecimal() else one for one in ids]


@contextlib.contextmanager
def _initialised(nvml: ModuleType) -> Iterator[bool]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if not isinstance(error, nvml.NVMLError_LibraryNotFound):
            _warn(f"NVML does not tell which GPUs there are: {error}")
        yield False
        return
    try:
        yield True
    finally:
        nvml.nvmlShutdown()


def _uses(nvml: ModuleType) -> Iterator[GpuUse]:
    for number in range(nvml.nvmlDeviceGetCount()):
        try:
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            if slices := list(_slices(nvml, gpu)):
                yield from [_use(nvml, number, one, busy=False) for one in slices]
            else:
                yield _use(nvml, number, gpu, busy=True)
        except nvml.NVMLError as error:
            _warn(f"NVML does not tell the memory of GPU {number}, which is left out: {error}")


def _slices(nvml: ModuleType, gpu: Any) -> Iterator[Any]:
    """Yield the MIG slices of a GPU."""
    # NVMLError: most GPUs have no MIG, and of those that have, most places for a slice are empty.
    with contextlib.suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetMigMode(gpu)[0] != nvml.NVML_DEVICE_MIG_ENABLE:
            return
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with contextlib.suppress(nvml.NVMLError_NotFound):
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)


def _use(nvml: ModuleType, number: int, gpu: Any, *, busy: bool) -> GpuUse:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu)
    share = None
    if busy:
        with contextlib.suppress(nvml.NVMLError):
            share = nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    return GpuUse(
        nvml.nvmlDeviceGetUUID(gpu), number, nvml.nvmlDeviceGetName(gpu), memory.total, memory.used, share
    )


@cache
def _warn(text: str) -> None:
    """Log a warning once: the metrics ask again and again."""
    LOG.warning("%s", text)

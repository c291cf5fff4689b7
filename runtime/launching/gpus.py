"""Finds the library that knows the GPUs of this machine. Without one, the setting `gpus` says which GPUs there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .amd_gpus import AmdDriver
from .gpu_driver import GpuDriver
from .nvidia_gpus import NvidiaDriver

# Every base has it: torch then asks the driver's library whether there are GPUs, and does not make a context to find out,
# which no fork would survive.
ASK_WITHOUT_USE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# What functions inherit of the gateway's environment that concerns GPUs.
PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_")
NVIDIA_MODULE, AMD_MODULE = Path("/proc/driver/nvidia"), Path("/dev/kfd")


def find_driver() -> GpuDriver:
    """Return the driver of this machine's GPUs: NVIDIA's, unless only AMD's is there or finds some."""
    nvidia, amd = NvidiaDriver(), AmdDriver()
    if not NVIDIA_MODULE.exists() and (AMD_MODULE.exists() or (not nvidia.uses() and amd.uses())):
        return amd
    return nvidia


def names_within(given: Sequence[str], ids: Iterable[str]) -> list[str]:
    """Return the names of GPUs in a container, which counts the GPUs that it is `given` from 0. It knows ids that are no numbers too."""
    numbers = sorted(int(one) for one in given if one.isdecimal())
    return [str(numbers.index(int(one))) if one.isdecimal() else one for one in ids]

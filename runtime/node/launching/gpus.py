"""Finds the library that knows the GPUs of this machine.

Without such a library, the setting `gpus` says which GPUs there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from .amd_gpus import AmdDriver
from .gpu_driver import GpuDriver
from .nvidia_gpus import NvidiaDriver

# Every base gets this variable. Torch then asks the driver's library whether there are GPUs. Otherwise, torch would
# make a context to find out, and a process that is forked after that cannot use the GPUs.
ASK_WITHOUT_USE = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# Functions inherit the gateway's variables with these prefixes, which concern GPUs.
PREFIXES = ("CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_")
NVIDIA_MODULE, AMD_MODULE = Path("/proc/driver/nvidia"), Path("/dev/kfd")


def exist() -> bool:
    """Return True if the kernel of this machine has a driver of GPUs."""
    return NVIDIA_MODULE.exists() or AMD_MODULE.exists()


def find_driver() -> GpuDriver:
    """Return the driver of this machine's GPUs. It is AMD's driver if only AMD's kernel module is loaded, or if no
    module is loaded and only AMD's library finds GPUs. Otherwise it is NVIDIA's driver.
    """
    nvidia, amd = NvidiaDriver(), AmdDriver()
    if not NVIDIA_MODULE.exists() and (AMD_MODULE.exists() or (not nvidia.uses() and amd.uses())):
        return amd
    return nvidia


def names_within(given: Sequence[str], ids: Iterable[str]) -> list[str]:
    """Return the names that the GPUs `ids` have in a container. `given` are all GPUs of the container, which numbers
    them from 0. An id that is not a number stays the same.
    """
    numbers = sorted(int(one) for one in given if one.isdecimal())
    return [str(numbers.index(int(one))) if one.isdecimal() else one for one in ids]

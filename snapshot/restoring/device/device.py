"""Defines what the restore needs of a device, and finds the device of a name.

Only `cuda.py` knows torch.cuda, which also stands for AMD's devices in torch's builds for ROCm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.torch_version import TorchVersion

from ....errors import SnapshotError
from . import cuda
from .buffers import HostBuffers
from .copy_event import Event
from .simulated import SimulatedDevice

OLDEST_TORCH = "2.11"
"""The oldest version of torch for weights on a device. tests/torch_names lists its names."""
SIMULATED_DEVICE = "PILOTFLAME_SIMULATED_DEVICE"
"""The environment variable FOLDER:BYTES of processes that share a simulated device of this size."""
AUTO, CPU, SIMULATED = "auto", "cpu", "simulated"
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,2}))?", re.ASCII)


class Device(Protocol):
    """One device, and a stream of copies to it. Its methods may be called by several threads."""

    name: str
    device: torch.device
    made_s: tuple[float, float]
    """When making it began and ended, by the monotonic clock. It includes the context that the process needs there."""
    buffers: HostBuffers
    """Made by `buffer`. All devices of one kind in this process may share them."""

    def empty(self, size_bytes: int) -> Tensor:
        """Return uninitialised bytes on the device. Raises SnapshotError if it has no room for them."""

    def buffer(self, size_bytes: int) -> Tensor:
        """Return uninitialised bytes of the host, from which copies are fast. Raises RuntimeError if it cannot pin them."""

    def copy(
        self,
        source: Tensor,
        target: Tensor,
        after: Sequence[Event] = (),
        then: Callable[[], None] | None = None,
    ) -> Event:
        """Begin to copy `source`, which is on the host, to `target`, of `empty`.

        `then` submits operations that follow the copy and `after`, which are earlier copies. The event is the end of
        all of it. It is fast if `source` is of `buffers`; it may be filled again after the event.
        """

    def finish(self) -> None:
        """Block until the device has ended all submitted work."""

    def resize(self, storage: UntypedStorage, size_bytes: int, *, copied_to: bool) -> None:
        """Give memory of the device back, or allocate it again. Raises SnapshotError if there is no room.

        The allocated memory is uninitialised. Nothing may use the storage meanwhile. With `copied_to`, it is a target of
        `copy`.
        """

    def release(self) -> None:
        """Give memory that was freed back to the driver, where torch would keep it for later."""


def find_device(name: str, gpus: int = 0) -> Device | None:
    """Return the device `name`, always the same object; None if that is the host itself, where weights are mapped.

    "auto" is the first CUDA device if there is one, and otherwise the host, but not if the function has `gpus`. Raises
    SnapshotError if there is no such device. Call it in a worker: the zygote must not use a device, because it forks.
    """
    check_name(name)
    if name == CPU or (name == AUTO and not _available(gpus)):
        return None
    if name == SIMULATED:
        return _simulated()
    found = _CUDA.fullmatch(name)
    return _cuda(int(found[1] or 0) if found else 0)


def _available(gpus: int) -> bool:
    if cuda.available():
        _check_torch(AUTO)
        return True
    if gpus:
        fault = f'resources.gpus is {gpus}, but torch finds no CUDA device for "auto".'
        raise SnapshotError(
            fault, remedy="Install a torch for CUDA, or remove resources.gpus to run on the host."
        )
    return False


@cache
def _cuda(number: int) -> Device:
    return cuda.CudaDevice(number)


@cache
def _simulated() -> Device:
    folder, _, capacity_bytes = os.environ.get(SIMULATED_DEVICE, "").rpartition(":")
    if not folder:
        return SimulatedDevice()
    return SimulatedDevice(capacity_bytes=int(capacity_bytes), folder=Path(folder))


def check_name(name: str) -> None:
    """Raise SnapshotError if no device can have this name, or if this torch is too old for it."""
    if _CUDA.fullmatch(name):
        _check_torch(name)
    elif name not in {AUTO, CPU, SIMULATED}:
        fault = f"There is no device {name[:80]!r}."
        raise SnapshotError(fault, remedy='Pass "auto", "cpu", "cuda", or "cuda:N" with a number.')


def _check_torch(name: str) -> None:
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        fault = (
            f"torch {torch.__version__} is installed, and the device {name!r} needs {OLDEST_TORCH} or later."
        )
        raise SnapshotError(fault, remedy='Install torch>=2.11, or pass device="cpu".')

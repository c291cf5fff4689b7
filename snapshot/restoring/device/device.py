"""Defines the interface of a device, and finds the device with a name.

Only `cuda.py` uses torch.cuda. In torch's builds for ROCm, torch.cuda means AMD's devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.torch_version import TorchVersion

from ....errors import SnapshotError
from . import cuda
from .buffers import HostBuffers
from .copy_event import CopyEvent

OLDEST_TORCH = "2.11"
"""The oldest version of torch that supports weights on a device. tests/torch_names lists the names of torch.cuda in that version."""
AUTO, CPU = "auto", "cpu"
_CUDA = re.compile(r"cuda(?::(0|[1-9][0-9]{0,2}))?", re.ASCII)


class Device(Protocol):
    """One device, and a stream of copies to it. Its methods may be called by several threads."""

    name: str
    device: torch.device
    made_s: tuple[float, float]
    """When the creation of this object began and ended (monotonic clock), including the process's context on the device."""
    buffers: HostBuffers
    """Host memory made by `buffer`. All devices of one kind in this process may share these buffers."""

    def empty(self, size_bytes: int) -> Tensor:
        """Return uninitialised bytes on the device. Raise SnapshotError if the device has too little free memory."""

    def buffer(self, size_bytes: int) -> Tensor:
        """Return uninitialised bytes of pinned host memory, for fast copies. Raise RuntimeError if pinning fails."""

    def pin(self, memory: Tensor) -> bool:
        """Pin read-only memory of the host, such as mapped files, for fast copies. Return False if that is impossible.

        `memory` begins at a multiple of the page size. The memory must not be unmapped before `unpin`.
        """

    def pinned_bytes(self) -> int:
        """Return how many bytes of the host all processes have pinned. The number may leave out memory that `buffer` pins."""

    def unpin(self, memory: Tensor) -> None:
        """Undo `pin` of this memory. Call it only after all copies from the memory have ended."""

    def copy(
        self,
        source: Tensor,
        target: Tensor,
        after: Sequence[CopyEvent] = (),
        then: Callable[[], None] | None = None,
    ) -> CopyEvent:
        """Begin to copy `source`, which is on the host, to `target`, which is from `empty`.

        `then` submits operations that run after this copy and after the earlier copies `after`. The returned event happens
        when this copy, `after` and these operations have ended. The copy is fast if `source` is from `buffers`, or is a part
        of memory that one call of `pin` has pinned. Do not write to `source` before the event.
        """

    def finish(self) -> None:
        """Block until the device has ended all submitted work."""

    def resize(self, storage: UntypedStorage, size_bytes: int, *, copied_to: bool) -> None:
        """Free the memory of a storage (size 0), or allocate it again. Raise SnapshotError if the device has too little memory.

        The allocated memory is uninitialised. Nothing may use the storage during the call. Pass `copied_to` if the storage
        is a target of `copy`.
        """

    def release(self) -> None:
        """Return freed memory to the driver. Without this call, torch would keep the memory for later allocations."""


DEVICES: dict[str, Callable[[], Device]] = {}
"""Further devices by name. The tests add a simulated device."""


def find_device(name: str, gpus: int = 0) -> Device | None:
    """Return the device with a name, always as the same object. None for the host, where weights are mapped.

    "auto" is the first CUDA device. If there is no CUDA device, "auto" is the host, or an error if the function has
    `gpus`. Raise SnapshotError if there is no such device. Call this only in a worker: the zygote must not use a device,
    because it forks.
    """
    check_name(name)
    if name == CPU or (name == AUTO and not _available(gpus)):
        return None
    if name in DEVICES:
        return DEVICES[name]()
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


def check_name(name: str) -> None:
    """Raise SnapshotError if no device can have this name, or if this torch is too old for the device."""
    if _CUDA.fullmatch(name):
        _check_torch(name)
    elif name not in {AUTO, CPU, *DEVICES}:
        fault = f"There is no device {name[:80]!r}."
        raise SnapshotError(fault, remedy='Pass "auto", "cpu", "cuda", or "cuda:N" with a number.')


def _check_torch(name: str) -> None:
    if TorchVersion(torch.__version__) < OLDEST_TORCH:
        fault = (
            f"torch {torch.__version__} is installed, and the device {name!r} needs {OLDEST_TORCH} or later."
        )
        raise SnapshotError(fault, remedy='Install torch>=2.11, or pass device="cpu".')

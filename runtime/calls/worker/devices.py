"""Asks torch about the devices that a worker uses. In torch's builds for ROCm, torch.cuda controls AMD's devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ....errors import PilotflameError, SnapshotError
from ....snapshot.named import Snapshots

CPU = "cpu"


def describe() -> str:
    """Return "cuda:" and the name of the device if the handler has used a device, else "cpu"."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return CPU
    return f"cuda:{torch.cuda.get_device_name()}"


def limit_memory(size_bytes: int | None) -> None:
    """Limit the memory that torch allocates on each GPU, and replace an earlier limit. None means all memory of the
    GPU.

    A worker that needs more memory fails itself, and does not make other workers on the GPU fail. Without GPUs, this
    does nothing.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    if size_bytes is None and not torch.cuda.is_initialized():
        return
    for number in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(number).total_memory
        share = 1.0 if size_bytes is None else min(1.0, size_bytes / total)
        torch.cuda.set_per_process_memory_fraction(share, number)


def reserved_bytes() -> list[int]:
    """Give back the memory that torch's allocator does not use. Return how many bytes it keeps of each GPU, in torch's
    order.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    torch.cuda.empty_cache()
    return [torch.cuda.memory_reserved(number) for number in range(torch.cuda.device_count())]


def may_be_of_device(error: BaseException) -> bool:
    """Return True if an exception, or one of its causes, may be the error of a device. Torch reports such errors as
    RuntimeError.
    """
    return any(isinstance(one, (RuntimeError, SnapshotError)) for one in _causes(error))


def failure(snapshots: Snapshots | None) -> PilotflameError | RuntimeError | None:
    """Wait for the devices that this process uses. Return the error of a device that has failed, or None.

    After an illegal access, for example, this process cannot use the device any more, but a new process can.
    """
    try:
        if snapshots is not None:
            snapshots.finish()
        if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
            for number in range(torch.cuda.device_count()):
                # Do not wait for a device that was not used, because this would make a context there.
                if torch.cuda.memory_reserved(number):
                    torch.cuda.synchronize(number)
    except (PilotflameError, RuntimeError) as error:
        return error
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen = set[int]()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or one.__context__

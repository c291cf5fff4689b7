"""A CUDA device. In the snapshot engine, this is the only module that uses torch.cuda."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, UntypedStorage

from ....errors import SnapshotError
from .buffers import HostBuffers

if TYPE_CHECKING:
    from .copy_event import CopyEvent


def available() -> bool:
    return torch.cuda.is_available()


def described() -> list[str]:
    """Return the name and the memory of each device that torch finds, such as "NVIDIA H200, 139 GiB"."""
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [f"{one.name}, {one.total_memory / (1 << 30):.0f} GiB" for one in found]


VMSTAT = Path("/proc/vmstat")
# Flags of cudaHostRegister: pin the memory for the contexts of all devices, and let devices only read the memory.
_PORTABLE, _READ_ONLY = 1, 8


def _pinned(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@cache
def _buffers() -> HostBuffers:
    """Return the buffers of this process. Copies to every CUDA device can use them."""
    return HostBuffers(_pinned)


class CudaEvent:
    """The end of a copy on one of the device's streams."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        # With `blocking`, a thread that waits sleeps, and leaves the processor to other threads.
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def done(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._event.synchronize()

    def precede(self) -> None:
        self.precede_on(torch.cuda.current_stream(self._device))

    def precede_on(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._event)


class CudaDevice:
    """The CUDA device with a number. The constructor makes the process's CUDA context on it if there is none."""

    def __init__(self, number: int) -> None:
        self.name, begun_s = f"cuda:{number}", time.monotonic()
        if not torch.cuda.is_available():
            remedy = 'Pass device="auto" to use the host where there is none, and see `pilotflame doctor`.'
            raise SnapshotError(f"torch finds no CUDA device for {self.name!r}.", remedy=remedy)
        if number >= torch.cuda.device_count():
            fault = f"There is no {self.name}: torch finds {torch.cuda.device_count()} CUDA devices."
            raise SnapshotError(fault, remedy="Pass the number of one that there is, from 0.")
        self.device = torch.device("cuda", number)
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        # The operations that follow a copy run on this stream, so that the next copy need not wait for them.
        self._following = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.buffers = _buffers()
        self.made_s = begun_s, time.monotonic()

    def empty(self, size_bytes: int) -> Tensor:
        with self._room(size_bytes), self._on(self._stream):
            found = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        self._record(found)
        return found

    def resize(self, storage: UntypedStorage, size_bytes: int, *, copied_to: bool) -> None:
        # Allocate the target of a copy on the stream of copies, as in `empty`.
        stream = self._stream if copied_to else torch.cuda.current_stream(self.device)
        with self._room(size_bytes), self._on(stream):
            storage.resize_(size_bytes)
        if size_bytes and copied_to:
            # The storage now has another block of the allocator. Record this block too.
            self._record(torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage))

    def release(self) -> None:
        # Keep pinned memory: the buffers are used again, and torch 2.11 cannot free pinned memory.
        torch.cuda.empty_cache()

    def finish(self) -> None:
        torch.cuda.synchronize(self.device)

    def buffer(self, size_bytes: int) -> Tensor:
        return _pinned(size_bytes)

    def pin(self, memory: Tensor) -> bool:
        # Do not pin with HIP, where the number of _READ_ONLY means another flag.
        if torch.version.hip:
            return False
        with torch.cuda.device(self.device):
            failed = _runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE | _READ_ONLY)
            if int(failed):
                self._clear_error()
        return not int(failed)

    def _clear_error(self) -> None:
        """Let the runtime forget its last error. Otherwise torch would report it as an error of a later kernel."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.device)

    def pinned_bytes(self) -> int:
        """Read the counts of pinned pages, which the kernel has since Linux 5.7."""
        counts = dict(line.split() for line in VMSTAT.read_text().splitlines())
        pages = int(counts.get("nr_foll_pin_acquired", 0)) - int(counts.get("nr_foll_pin_released", 0))
        return pages * mmap.PAGESIZE

    def unpin(self, memory: Tensor) -> None:
        with torch.cuda.device(self.device):
            _runtime().cudaHostUnregister(memory.data_ptr())

    def copy(
        self,
        source: Tensor,
        target: Tensor,
        after: Sequence[CopyEvent] = (),
        then: Callable[[], None] | None = None,
    ) -> CopyEvent:
        # Do not wait for `after`: these copies were submitted earlier to the same stream as this copy, so they end before it. In
        # the same way, the operations of their `then` end before the operations of this `then`.
        with self._on(self._stream):
            target.copy_(source, non_blocking=True)
            event = CudaEvent(self.device, self._stream)
        if then is not None:
            # Let the allocator reuse the memory of `target` only after `then` has ended.
            target.record_stream(self._following)
            with self._on(self._following):
                event.precede_on(self._following)
                then()
                event = CudaEvent(self.device, self._following)
        return event

    def _record(self, memory: Tensor) -> None:
        """Let the allocator reuse `memory` only after the default stream has ended all operations that it has when `memory` is freed."""
        memory.record_stream(torch.cuda.default_stream(self.device))

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        # Enter the device's context first: without it, leaving the stream's context would make a CUDA context on the
        # first device.
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            yield

    @contextmanager
    def _room(self, size_bytes: int) -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            fault = f"The weights need {size_bytes} bytes on {self.name}, which has {free} of {total} free."
            raise SnapshotError(fault, remedy="Free memory there, or use a smaller model.") from error

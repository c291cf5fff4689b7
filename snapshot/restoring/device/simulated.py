"""A device for tests, whose memory is memory of the host. Its copies end late, and it refuses what CUDA refuses.

It has several streams. Each copy goes to a random stream, and each stream runs its copies in order. So code that works
with this device does not depend on the order or the speed of copies. These are errors, as with CUDA:

- an allocation beyond the capacity, which includes the context of the process
- any use in a process forked after the first use
- a copy to memory that was given back, or from memory that was unpinned: like any other fault of the device, it makes
  all later calls fail
- during the capture of a graph: allocating, pinning, freeing, or asking whether a copy has ended

An operation that was submitted to a stream does not keep its memory allocated. After the memory is freed, the operation
reads poison, unless `record` was called before. `record` corresponds to torch's `record_stream`.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from .buffers import HostBuffers
from .simulated_memory import POISON, SimulatedBlock, SimulatedMemory
from .simulated_stream import SimulatedStream

if TYPE_CHECKING:
    from .copy_event import CopyEvent

STREAMS = 3
DELAY_S = 0.002
CAPACITY_BYTES = 1 << 40
CONTEXT_BYTES = 1 << 20


class SimulatedEvent:
    """The end of a simulated copy."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._ended = threading.Event()

    def end(self) -> None:
        self._ended.set()

    def done(self) -> bool:
        self._device.check(capturable=False)
        return self._ended.is_set()

    def wait(self) -> None:
        self._device.check(capturable=False)
        self._ended.wait()
        self._device.check()

    def precede(self) -> None:
        # Operations that the host submits run at once, so the host has to wait for the copy.
        self._ended.wait()
        self._device.check()


class SimulatedDevice:
    """Several streams. Each operation on them takes a random time of up to 2 * `delay_s`."""

    name = "simulated"
    device = torch.device("cpu")

    def __init__(
        self, seed: int = 0, delay_s: float = DELAY_S, *,
        capacity_bytes: int = CAPACITY_BYTES, context_bytes: int = CONTEXT_BYTES, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Processes with the same `folder` share the capacity. Raises SnapshotError if the context has no room."""
        begun_s = time.monotonic()
        self.context_bytes, self._counted = context_bytes, SimulatedMemory(capacity_bytes, folder)
        self._counted.hold(0, context_bytes)
        self.pins_left = 1 << 30
        """How many further buffers and parts of files the host can pin."""
        self._pinned: dict[int, int] = {}
        """The end of each pinned part of a file, by its address."""
        self._random, self._delay_s = random.Random(seed), delay_s  # noqa: S311  not a secret
        self._pid, self._fault, self._capturing, self._spoilt = os.getpid(), "", False, ""
        self._blocks: list[SimulatedBlock] = []
        # Held during each operation on memory, so that no memory is given back in the middle of an operation.
        self._memory = threading.RLock()
        self.streams = [
            SimulatedStream(f"simulated-stream-{number}", lambda error: self.fail(repr(error)))
            for number in range(STREAMS)
        ]
        self.buffers = HostBuffers(self.buffer)
        # Stands for the time that the context of a real device takes.
        threading.Event().wait(delay_s)
        self.made_s = begun_s, time.monotonic()

    def empty(self, size_bytes: int) -> Tensor:
        self.check(capturable=False)
        with self._memory:
            self._counted.hold(self.held_bytes, size_bytes)
            found = torch.full((size_bytes,), POISON, dtype=torch.uint8)
            self._blocks.append(SimulatedBlock(found.untyped_storage()))
        return found

    def buffer(self, size_bytes: int) -> Tensor:
        self.check(capturable=False)
        if not self.pins_left:
            raise RuntimeError("The host cannot pin more memory.")
        self.pins_left -= 1
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> bool:
        self.check(capturable=False)
        if not self.pins_left:
            return False
        self.pins_left -= 1
        self._pinned[memory.data_ptr()] = memory.data_ptr() + memory.nbytes
        return True

    def pinned_bytes(self) -> int:
        return sum(end - begin for begin, end in self._pinned.items())

    def unpin(self, memory: Tensor) -> None:
        del self._pinned[memory.data_ptr()]

    def _pin_of(self, memory: Tensor) -> int | None:
        """Return the address of the pinned part that `memory` is in, or None."""
        begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        return next((first for first, last in self._pinned.items() if first <= begin and end <= last), None)

    def copy(
        self,
        source: Tensor,
        target: Tensor,
        after: Sequence[CopyEvent] = (),
        then: Callable[[], None] | None = None,
    ) -> CopyEvent:
        self.check()
        event, stream = SimulatedEvent(self), self._random.choice(self.streams)
        block, pin = self._block_of(target.untyped_storage()), self._pin_of(source)

        def run(memory: Tensor) -> None:
            if block.given_back:
                raise IndexError("an illegal access: a copy to memory that was given back")
            if pin is not None and pin not in self._pinned:
                raise IndexError("an illegal access: a copy from memory that was unpinned")
            memory.copy_(source)
            if then is not None:
                then()

        for one in after:
            stream.put(one.precede)
        self.submit(stream, run, target)
        self.record(target, stream)
        stream.put(event.end)
        return event

    def submit(self, stream: SimulatedStream, operation: Callable[[Tensor], object], memory: Tensor) -> None:
        """Let a stream call `operation` with `memory`, or with poison if `memory` is freed by then."""
        block, dtype = self._block_of(memory.untyped_storage()), memory.dtype
        place = memory.storage_offset(), memory.shape, memory.stride()

        def run() -> None:
            with self._memory:
                operation(torch.empty(0, dtype=dtype).set_(block.storage(), *place))

        stream.put(run, self._random.random() * 2 * self._delay_s)

    def record(self, memory: Tensor, stream: SimulatedStream) -> None:
        """Keep the content of `memory`, even if it is freed, until `stream` has run the operations submitted so far."""
        block = self._block_of(memory.untyped_storage())

        def passed() -> None:
            with self._memory:
                block.passed()

        with self._memory:
            block.record()
        stream.put(passed)

    def finish(self) -> None:
        self.check(capturable=False)
        for stream in self.streams:
            stream.finish()
        self.check()

    def release(self) -> None:
        # The device keeps no freed memory. Only tell other processes how much is free now.
        self.check(capturable=False)
        self._counted.hold(self.held_bytes)

    def resize(self, storage: UntypedStorage, size_bytes: int, *, copied_to: bool) -> None:
        self.check(capturable=False)
        with self._memory:
            self._counted.hold(self.held_bytes, size_bytes - storage.nbytes())
            self._block_of(storage).give_back()
            storage.resize_(size_bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
            self._blocks.append(SimulatedBlock(storage))

    # -- what can go wrong

    @property
    def held_bytes(self) -> int:
        """How many bytes of the device this process holds, including its context."""
        with self._memory:
            self._blocks = [one for one in self._blocks if not one.freed]
            return self.context_bytes + sum(one.size_bytes for one in self._blocks)

    def fail(self, fault: str) -> None:
        """Make every later call fail, as after an illegal access."""
        self._fault = self._fault or fault

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph. Raises RuntimeError at the end if any thread made a call that a capture does not allow."""
        self._capturing, self._spoilt = True, ""
        try:
            yield
        finally:
            self._capturing = False
        if self._spoilt:
            raise RuntimeError(f"The capture failed: {self._spoilt}.")

    def check(self, *, capturable: bool = True) -> None:
        """Raise RuntimeError as CUDA does: after a fault, after a fork, or if a capture does not allow the call."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"Process {self._pid} used the simulated device before this one was forked.")
        if self._fault:
            raise RuntimeError(f"The simulated device has failed: {self._fault}")
        if self._capturing and not capturable:
            self._spoilt = f"thread {threading.current_thread().name} called what a capture does not allow"
            raise RuntimeError("The simulated device does not allow this while a graph is captured.")

    def _block_of(self, storage: UntypedStorage) -> SimulatedBlock:
        with self._memory:
            found = (one for one in self._blocks if one.is_of(storage))
            return next(found, None) or SimulatedBlock(storage)

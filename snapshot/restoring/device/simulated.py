"""A device that is memory of the host, for tests. Its copies end late, and it refuses what CUDA refuses.

It has several streams. Each runs its copies in order, and a copy goes to a random stream. So code that works with it
depends on neither the order of copies nor their speed. These are errors, as with CUDA:

- an allocation beyond the capacity, which includes the context of the process
- any use in a process forked after the first use
- a copy to memory that was given back: like any other fault of the device, it lets all later calls fail
- during the capture of a graph: allocating, pinning, freeing, or asking whether a copy has ended
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from .buffers import HostBuffers
from .simulated_memory import SimulatedMemory

if TYPE_CHECKING:
    from .device import Event

STREAMS = 3
DELAY_S = 0.002
CAPACITY_BYTES = 1 << 40
CONTEXT_BYTES = 1 << 20
POISON = 0x7F
"""What uninitialised memory has. Not 0, so that weights that are read too early are wrong."""


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
        # What the host submits runs at once, so the host has to wait.
        self._ended.wait()
        self._device.check()


class SimulatedDevice:
    """Threads that each make the copies of one stream, every copy after a random time of up to 2 * `delay_s`."""

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
        """How many more buffers the host can pin."""
        self._random, self._delay_s = random.Random(seed), delay_s  # noqa: S311  not a secret
        self._pid, self._fault, self._capturing, self._spoilt = os.getpid(), "", False, ""
        self._sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        # Held while the device uses memory, so that nothing is given back in the middle of a copy.
        self._memory = threading.RLock()
        self._never = threading.Event()
        self._running, self._changed = 0, threading.Condition()
        self._streams: list[SimpleQueue[Callable[[], None]]] = [SimpleQueue() for _ in range(STREAMS)]
        for number, stream in enumerate(self._streams):
            name = f"simulated-stream-{number}"
            threading.Thread(target=self._run, args=(stream,), name=name, daemon=True).start()
        self.buffers = HostBuffers(self.buffer)
        # As long as the context of a device, in small.
        self._never.wait(delay_s)
        self.made_s = begun_s, time.monotonic()

    def empty(self, size_bytes: int) -> Tensor:
        self.check(capturable=False)
        with self._memory:
            self._counted.hold(self.held_bytes, size_bytes)
            found = torch.full((size_bytes,), POISON, dtype=torch.uint8)
            self._note(found.untyped_storage())
        return found

    def buffer(self, size_bytes: int) -> Tensor:
        self.check(capturable=False)
        if not self.pins_left:
            raise RuntimeError("The host cannot pin more memory.")
        self.pins_left -= 1
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def copy(
        self,
        source: Tensor,
        target: Tensor,
        after: Sequence[Event] = (),
        then: Callable[[], None] | None = None,
    ) -> Event:
        self.check()
        event = SimulatedEvent(self)

        def run() -> None:
            try:
                for one in after:
                    one.precede()
                with self._memory:
                    _check_backed(target)
                    target.copy_(source)
                    if then is not None:
                        then()
            except Exception as error:  # noqa: BLE001  every later call gets it
                self.fail(repr(error))
            event.end()

        with self._changed:
            self._running += 1
        self._random.choice(self._streams).put(run)
        return event

    def finish(self) -> None:
        self.check(capturable=False)
        with self._changed:
            self._changed.wait_for(lambda: not self._running)
        self.check()

    def release(self) -> None:
        # Nothing is kept, but other processes may not know yet what was freed.
        self.check(capturable=False)
        self._counted.hold(self.held_bytes)

    def resize(self, storage: UntypedStorage, size_bytes: int, *, copied_to: bool) -> None:
        self.check(capturable=False)
        with self._memory:
            self._counted.hold(self.held_bytes, size_bytes - storage.nbytes())
            storage.resize_(size_bytes)
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(POISON)
            self._note(storage)

    # -- what can go wrong

    @property
    def held_bytes(self) -> int:
        """How many bytes of the device this process has, with its context."""
        with self._memory:
            self._sizes = {key: one for key, one in self._sizes.items() if not one[0].expired()}  # type: ignore[no-untyped-call]
            return self.context_bytes + sum(size_bytes for _, size_bytes in self._sizes.values())

    def fail(self, fault: str) -> None:
        """Let every call fail from now on, as after an illegal access."""
        self._fault = self._fault or fault

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph. Raises RuntimeError at the end if any thread did what a capture does not allow."""
        self._capturing, self._spoilt = True, ""
        try:
            yield
        finally:
            self._capturing = False
        if self._spoilt:
            raise RuntimeError(f"The capture failed: {self._spoilt}.")

    def check(self, *, capturable: bool = True) -> None:
        """Raise RuntimeError as CUDA does: after a fault, in a forked process, or if a capture does not allow the call."""
        if os.getpid() != self._pid:
            raise RuntimeError(f"Process {self._pid} used the simulated device before this one was forked.")
        if self._fault:
            raise RuntimeError(f"The simulated device has failed: {self._fault}")
        if self._capturing and not capturable:
            self._spoilt = f"thread {threading.current_thread().name} called what a capture does not allow"
            raise RuntimeError("The simulated device does not allow this while a graph is captured.")

    def _note(self, storage: UntypedStorage) -> None:
        ref = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._sizes[storage._cdata] = ref, storage.nbytes()  # noqa: SLF001

    def _run(self, stream: SimpleQueue[Callable[[], None]]) -> None:
        while True:
            run = stream.get()
            # Nobody sets it: this is the time that the copy takes.
            self._never.wait(self._random.random() * 2 * self._delay_s)
            run()
            # It refers to the tensors.
            del run
            with self._changed:
                self._running -= 1
                self._changed.notify_all()


def _check_backed(target: Tensor) -> None:
    """Raise IndexError if the memory of a tensor was given back."""
    end = (target.storage_offset() + target.numel()) * target.itemsize
    if end > target.untyped_storage().nbytes():
        raise IndexError("an illegal access: a copy to memory that was given back")

"""A device for tests, whose memory is memory of the host. Its copies end late, and it refuses what CUDA refuses.

It has several streams. Each copy goes to a random stream, and each stream runs its copies in order. So code
that works with this device does not depend on the order or the speed of copies. As with CUDA, these are
errors:

- an allocation beyond the capacity, which includes the context of the process
- any use in a process forked after the first use
- a copy to memory that was given back, or from memory that was unpinned: like any other fault of the device, it makes
  all later calls fail
- during the capture of a graph: allocating, pinning, freeing, or asking whether a copy has ended

An operation that was submitted to a stream does not keep its memory allocated. After the memory is freed, the operation
reads poison, unless `record` was called before. `record` corresponds to torch's `record_stream`.

The import of this module adds the device "simulated". Handlers that use it end with `ADDED`, since workers are other
processes. Processes with the same `PILOTFLAME_SIMULATED_DEVICE=FOLDER:BYTES` share a device of BYTES.
"""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import Queue

import torch
from pilotflame.errors import SnapshotError
from pilotflame.snapshot.restoring.device.buffers import HostBuffers
from pilotflame.snapshot.restoring.device.copy_event import CopyEvent
from pilotflame.snapshot.restoring.device.device import DEVICES
from torch import Tensor, UntypedStorage

ADDED = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import simulated_device
"""
SIMULATED = "simulated"
STREAMS = 3
DELAY_S = 0.002
CAPACITY_BYTES = 1 << 40
CONTEXT_BYTES = 1 << 20
POISON = 0x7F
"""The value of bytes that are uninitialised or freed. It is not 0, so that a test notices weights with such bytes."""


class SimulatedMemory:
    """Counts the bytes that this process holds, and the bytes that other processes with the same folder hold.

    Each process keeps a locked file in the folder, with the number of its bytes as text. The kernel drops the lock when
    the process ends.
    """

    def __init__(self, capacity_bytes: int, folder: Path | None = None) -> None:
        self.capacity_bytes, self._folder = capacity_bytes, folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            with self._alone(folder):
                self._own = os.open(folder / f"held-{os.getpid()}-{id(self)}", os.O_CREAT | os.O_RDWR, 0o600)
                fcntl.flock(self._own, fcntl.LOCK_EX)

    def hold(self, held_bytes: int, new_bytes: int = 0) -> None:
        """Add `new_bytes` to the `held_bytes` that this process holds. Raise SnapshotError if there is no room."""
        if self._folder is None:
            self._check(new_bytes, self.capacity_bytes - held_bytes)
            return
        with self._alone(self._folder):
            if new_bytes > 0:
                self._check(new_bytes, self.capacity_bytes - held_bytes - self._of_others(self._folder))
            os.ftruncate(self._own, 0)
            os.pwrite(self._own, str(held_bytes + new_bytes).encode(), 0)

    def _check(self, new_bytes: int, free_bytes: int) -> None:
        if new_bytes > free_bytes:
            room = f"{max(0, free_bytes)} of {self.capacity_bytes} free"
            fault = f"The weights need {new_bytes} bytes on simulated, which has {room}."
            raise SnapshotError(fault, remedy="Free memory there, or use a smaller model.")

    def _of_others(self, folder: Path) -> int:
        own, found_bytes = os.fstat(self._own).st_ino, 0
        for path in folder.glob("held-*"):
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_ino == own:
                    continue
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    found_bytes += int(file.read() or b"0")
                else:
                    # The file is not locked any more, so its process has ended.
                    path.unlink()
        return found_bytes

    @contextmanager
    def _alone(self, folder: Path) -> Iterator[None]:
        with (folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class SimulatedBlock:
    """Memory from its allocation until it is freed and the recorded streams have run what was submitted
    before.
    """

    def __init__(self, storage: UntypedStorage) -> None:
        self.size_bytes, self.given_back = storage.nbytes(), False
        self._storage = weakref.ref(storage)
        self._recorded = 0
        self._kept: UntypedStorage | None = None

    @property
    def freed(self) -> bool:
        return self._found() is None

    def storage(self) -> UntypedStorage:
        """Return the memory, or poison if it is freed."""
        found = self._found()
        return poison(self.size_bytes) if found is None else found

    def record(self) -> None:
        """Keep the content for one more stream, until `passed` is called."""
        self._recorded += 1
        self._kept = self._found()

    def passed(self) -> None:
        self._recorded -= 1
        if not self._recorded:
            self._kept = None

    def give_back(self) -> None:
        """Free the memory. Call it before the storage gets other memory."""
        self.given_back = True
        if self._kept is not None:
            self._kept = self._kept.clone()  # type: ignore[no-untyped-call]

    def is_of(self, storage: UntypedStorage) -> bool:
        return not self.given_back and self._storage() is storage

    def _found(self) -> UntypedStorage | None:
        return self._kept if self._kept is not None or self.given_back else self._storage()


def poison(size_bytes: int) -> UntypedStorage:
    return torch.full((size_bytes,), POISON, dtype=torch.uint8).untyped_storage()


class SimulatedStream:
    """Runs operations one after the other. Calls `on_error` with the error of an operation that fails."""

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._on_error, self._never = on_error, threading.Event()
        self._queue = Queue[tuple[Callable[[], object], float]]()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, operation: Callable[[], object], takes_s: float = 0.0) -> None:
        """Submit an operation. The stream ends all earlier operations, waits for `takes_s`, and runs the operation."""
        self._queue.put((operation, takes_s))

    def finish(self) -> None:
        """Block until all submitted operations have run."""
        self._queue.join()

    def _run(self) -> None:
        while True:
            operation, takes_s = self._queue.get()
            if takes_s:
                # This event is never set. The timeout is the duration of the operation.
                self._never.wait(takes_s)
            try:
                operation()
            except Exception as error:  # noqa: BLE001  every later call of the device gets it
                self._on_error(error)
            # The operation refers to tensors, which must not stay in memory while the thread waits for the next one.
            del operation
            self._queue.task_done()


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

    name = SIMULATED
    device = torch.device("cpu")

    def __init__(
        self, seed: int = 0, delay_s: float = DELAY_S, *,
        capacity_bytes: int = CAPACITY_BYTES, context_bytes: int = CONTEXT_BYTES, folder: Path | None = None,
    ) -> None:  # fmt: skip
        """Processes with the same `folder` share the capacity. Raise SnapshotError if the context has no room."""
        begun_s = time.monotonic()
        self.context_bytes, self._counted = context_bytes, SimulatedMemory(capacity_bytes, folder)
        self._counted.hold(0, context_bytes)
        self.pins_left = 1 << 30
        """How many further buffers and parts of files the host can pin."""
        self._pinned: dict[int, int] = {}
        """The end of each pinned part of a file, by its address."""
        self._random, self._delay_s = random.Random(seed), delay_s
        self._pid, self._fault, self._capturing, self._spoilt = os.getpid(), "", False, ""
        self._blocks: list[SimulatedBlock] = []
        # Each operation on memory takes this lock, so that no memory is freed in the middle of an operation.
        self._memory = threading.RLock()
        self.streams = [
            SimulatedStream(f"simulated-stream-{number}", lambda error: self.fail(repr(error)))
            for number in range(STREAMS)
        ]
        self.buffers = HostBuffers(self.buffer)
        # Wait for the time that a real device needs to create its context.
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
        # The device keeps no freed memory. Only write the new number of bytes, which other processes read.
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
        """Return how many bytes of the device this process uses, including its context."""
        with self._memory:
            self._blocks = [one for one in self._blocks if not one.freed]
            return self.context_bytes + sum(one.size_bytes for one in self._blocks)

    def fail(self, fault: str) -> None:
        """Make every later call fail, as after an illegal access."""
        self._fault = self._fault or fault

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph. Raise RuntimeError at the end if any thread made a call that a capture does not allow."""
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


@cache
def simulated() -> SimulatedDevice:
    """Return the device with the name "simulated"."""
    folder, _, capacity_bytes = os.environ.get("PILOTFLAME_SIMULATED_DEVICE", "").rpartition(":")
    if not folder:
        return SimulatedDevice()
    return SimulatedDevice(capacity_bytes=int(capacity_bytes), folder=Path(folder))


DEVICES[SIMULATED] = simulated

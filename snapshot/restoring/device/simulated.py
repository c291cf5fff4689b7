"""A device that is memory of the host, for tests: its copies end late, and in another order than they began.

So code that works with it does not depend on the order of copies, nor on copies that end before they are waited for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
from torch import Tensor, UntypedStorage

from ....errors import SnapshotError

if TYPE_CHECKING:
    from .device import Event

STREAMS = 3
DELAY_S = 0.002


class SimulatedEvent:
    """The end of a simulated copy."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._error: Exception | None = None

    def end(self, error: Exception | None) -> None:
        self._error = error
        self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set() and self._error is None

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise SnapshotError(f"A copy to the simulated device failed: {self._error!r}.")

    def precede(self) -> None:
        # What the host submits runs at once, so the host has to wait.
        self.wait()


class SimulatedDevice:
    """Several threads that take copies from a queue, and make them after a random time of up to 2 * `delay_s`."""

    name = "simulated"
    device = torch.device("cpu")

    def __init__(self, seed: int = 0, delay_s: float = DELAY_S) -> None:
        begun_s = time.monotonic()
        self._random, self._delay_s = random.Random(seed), delay_s  # noqa: S311  not a secret
        self._never = threading.Event()
        self._running, self._changed = 0, threading.Condition()
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        for number in range(STREAMS):
            threading.Thread(target=self._run, name=f"simulated-stream-{number}", daemon=True).start()
        # As long as the context of a device, in small.
        self._never.wait(delay_s)
        self.made_s = begun_s, time.monotonic()

    def empty(self, size_bytes: int) -> Tensor:
        # Not zeros: what is read too early is to be wrong.
        return torch.full((size_bytes,), 0x7F, dtype=torch.uint8)

    def buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def copy(
        self,
        source: Tensor,
        target: Tensor,
        after: Sequence[Event] = (),
        then: Callable[[], None] | None = None,
    ) -> Event:
        event = SimulatedEvent()

        def run() -> None:
            try:
                for one in after:
                    one.wait()
                target.copy_(source)
                if then is not None:
                    then()
            except Exception as error:  # noqa: BLE001  those that wait get it
                event.end(error)
            else:
                event.end(None)

        with self._changed:
            self._running += 1
        self._queue.put(run)
        return event

    def finish(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def release(self) -> None:
        # Nothing is kept.
        return

    def resize(self, storage: UntypedStorage, size_bytes: int, *, copied_to: bool) -> None:
        storage.resize_(size_bytes)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0x7F)

    def _run(self) -> None:
        while True:
            run = self._queue.get()
            # Nobody sets it: this is the time that the copy takes.
            self._never.wait(self._random.random() * 2 * self._delay_s)
            run()
            # It refers to the tensors.
            del run
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

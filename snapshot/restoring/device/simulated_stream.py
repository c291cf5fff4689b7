"""A stream of a simulated device: a thread that runs the submitted operations in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue


class SimulatedStream:
    """Runs one operation after the other. Calls `on_error` with the error of an operation that fails."""

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

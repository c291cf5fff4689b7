"""A stream of a simulated device: a thread that runs in order what is submitted to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue


class SimulatedStream:
    """Runs one operation after the other. `on_error` is called with the error of an operation that fails."""

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._on_error, self._never = on_error, threading.Event()
        self._queue = Queue[tuple[Callable[[], object], float]]()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, operation: Callable[[], object], takes_s: float = 0.0) -> None:
        """Run it after what was submitted before. The stream takes `takes_s` before it does."""
        self._queue.put((operation, takes_s))

    def finish(self) -> None:
        """Block until all that was submitted has run."""
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
            # The operation refers to tensors.
            del operation
            self._queue.task_done()

"""Runs a forward pass in slices of whole layers, so that other passes run between its layers.

The pass runs in a thread of its own. Before each layer it looks at the clock, and waits there once its time is over. Only one of the two
threads runs at a time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


class _Stopped(BaseException):
    """Ends a pass whose result is not wanted any more. As a BaseException, it is not caught by the model's code."""


class PassSlices:
    """One forward pass at a time, of a model with these layers. Passes in other threads are not affected.

    Before it looks at the clock, a pass calls `wait`, which returns once the device has done what the pass has submitted.
    """

    def __init__(self, layers: Sequence[nn.Module], wait: Callable[[], None]) -> None:
        self._wait = wait
        self._passes: queue.SimpleQueue[Callable[[], Tensor]] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        """When the next slice ends, in seconds of the clock. None: the pass ends at once."""
        self._reports: queue.SimpleQueue[Tensor | Exception | None] = queue.SimpleQueue()
        """The result of a pass, or what it has raised. None: the pass waits before a layer."""
        self._thread: threading.Thread | None = None
        self._until_s = self._layer_s = 0.0
        """When this slice ends, and when its latest layer began."""
        self.paused = False
        """True while a pass waits before a layer."""
        for layer in layers:
            layer.register_forward_pre_hook(self._before_layer)

    def begin(self, run: Callable[[], Tensor], seconds: float) -> Tensor | None:
        """Begin a pass and run its first slice. Return its result, or None if it has not ended. Raise what the pass raises."""
        if self._thread is None:
            # Make it a daemon, so that the worker's end does not wait for it.
            self._thread = threading.Thread(target=self._work, name="language-model-reads", daemon=True)
            self._thread.start()
        self._until_s = time.perf_counter() + seconds
        self._passes.put(run)
        return self._report()

    def advance(self, seconds: float) -> Tensor | None:
        """Continue the pass for about `seconds`, and for at least one layer. Return its result, or None if it has not ended.

        Raise what the pass raises.
        """
        self._turns.put(time.perf_counter() + seconds)
        return self._report()

    def stop(self) -> None:
        """End the pass, if one has begun and not ended."""
        if self.paused:
            report = None
            while report is None:
                self._turns.put(None)
                report = self._reports.get()
            self.paused = False

    def _report(self) -> Tensor | None:
        report = self._reports.get()
        self.paused = report is None
        if isinstance(report, Exception):
            raise report
        return report

    # -- in the thread

    def _work(self) -> None:
        while True:
            run = self._passes.get()
            self._layer_s = time.perf_counter()
            try:
                self._reports.put(run())
            except Exception as error:  # noqa: BLE001  raised by `_report`
                self._reports.put(error)
            except BaseException as error:  # noqa: BLE001
                # Without a report, `_report` would wait for ever.
                self._reports.put(RuntimeError(f"a pass of the model ended with {error!r}"))
            # Free the keys and values of the prompt, which `run` references.
            del run

    def _before_layer(self, *_: Any) -> None:
        if threading.current_thread() is not self._thread:
            return
        self._wait()
        now_s = time.perf_counter()
        # Expect that the next layer takes as long as the latest one.
        if 2 * now_s - self._layer_s > self._until_s:
            self._reports.put(None)
            if (until_s := self._turns.get()) is None:
                raise _Stopped
            self._until_s, now_s = until_s, time.perf_counter()
        self._layer_s = now_s

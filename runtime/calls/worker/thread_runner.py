"""Runs plain handlers on the main thread, and on further threads if several calls may run at a time."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ....errors import Cancelled, DeadlineExceeded
from . import output
from .batch_run import BatchRun
from .call import Call
from .runner import Runner


@dataclass(eq=False)
class ThreadRunner(Runner):
    """Runs groups from a queue on `concurrency` threads."""

    gate: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Returns a context manager, which is entered around each handler call."""
    # An empty list in the queue ends one thread.
    _queue: queue.SimpleQueue[list[Call]] = field(default_factory=queue.SimpleQueue, init=False)
    _ended: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def enqueue(self, group: list[Call]) -> None:
        self._queue.put(group)

    def empty(self) -> list[Call]:
        left: list[Call] = []
        with contextlib.suppress(queue.Empty):
            while True:
                left += self._queue.get_nowait()
        return left

    def stop(self) -> list[Call]:
        left = self.empty()
        for _ in range(self.concurrency):
            self._queue.put([])
        return left

    def work(self) -> None:
        """Run groups on this thread until `close`. The last of the threads that ends calls `on_idle`."""
        taken: list[list[Call]] = []
        while group := self._next(taken):
            frames = self._execute(group) if self.handler.batch is None else self._execute_batch(group)
            self.probe_if_suspected()
            if output.unfinished:
                output.finish(group)
            self.forget(group)
            self.send(frames)
        with self._lock:
            self._ended += 1
            last = self._ended == self.concurrency
        if last:
            self.on_idle()

    def _next(self, taken: list[list[Call]]) -> list[Call]:
        """Wait for a group. The handler's own signal handlers may raise here, on the main thread."""
        while not taken:
            try:
                # Move the group in one step without Python code. A signal handler that raises between two steps would lose it.
                taken.extend(islice(iter(self._queue.get, None), 1))
            except BaseException:  # noqa: BLE001  no call runs, so it concerns no caller
                sys.stderr.write(f"Between two calls: {traceback.format_exc()}")
        return taken.pop()

    def _execute(self, group: list[Call]) -> list[bytes]:
        output.begin(group)
        self.tell_observers(group)
        calls, events, frames = self.answers.decode(group)
        if not calls:
            return frames
        arguments = self.handler.arguments(calls[0].context, events[0])
        started_s = self.started(calls)
        try:
            self.check()
            with self.gate():
                if self._streaming:
                    return [*frames, self._stream(calls[0], arguments, started_s)]
                answer = self.handler.call(*arguments)
                self.check()
                frames += self.limits.learn(self.concurrency, time.monotonic() - started_s)
                return frames + self.answers.result_frames(calls, answer, started_s)
        except BaseException as error:  # noqa: BLE001  the caller gets the error, and the thread goes on
            return frames + self.answers.failure_frames(calls, error)

    def _execute_batch(self, group: list[Call]) -> list[bytes]:
        run = BatchRun(self, group)
        while calls := run.next_piece():
            output.begin(calls)
            self.tell_observers(calls)
            started_s = self.started(calls)
            try:
                self.check()
                with self.gate():
                    answer = self.handler.call(*run.arguments(calls))
                    self.check()
            except BaseException as error:  # noqa: BLE001
                run.fail(calls, error)
            else:
                run.succeed(calls, answer, started_s)
        return run.frames

    def _stream(self, call: Call, arguments: tuple[Any, ...], started_s: float) -> bytes:
        """Send the chunks of a stream. Return its END or ERROR frame, which the caller must send."""
        chunks: Iterator[Any] = self.handler.call(*arguments)
        try:
            for chunk in chunks:
                frame, size = self.answers.chunk_frame(call, chunk)
                remaining_ms = call.context.remaining_ms()
                timeout_s = None if remaining_ms is None else remaining_ms / 1000
                granted = call.credit is None or call.credit.spend(size, timeout_s)
                if call.cancellation.flag:
                    gone = Cancelled("The caller went away while the handler streamed.")
                    return self.answers.error_frame(call, gone)
                if not granted:
                    # Report the deadline here, because the gateway's timer may fire a moment later.
                    late = DeadlineExceeded("The deadline passed while the caller did not read the stream.")
                    return self.answers.error_frame(call, late)
                self.check()
                self.link.send_encoded(frame)
        finally:
            if (close := getattr(chunks, "close", None)) is not None:
                close()
        return self.answers.end_frame(call, started_s)

"""Plain handlers and generators run on threads.

Not on the event loop, which must hear of cancels, drains and the gateway's end whatever a handler does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ...errors import Cancelled
from ...handlers.handler import Handler
from ..link.link import Link
from .batch_run import Course
from .groups import Groups
from .runner import Call, Runner


class ThreadRunner(Runner):
    """Plain handlers and generators: `concurrency` threads take groups from the queue."""

    def __init__(
        self,
        handler: Handler,
        root: Path,
        link: Link,
        concurrency: int,
        on_idle: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        gate: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`gate` is entered around every call of the handler."""
        super().__init__(handler, root, link, concurrency, on_idle)
        self._loop = loop
        self._gate = gate
        self._groups: Groups[Call] = Groups()
        self._ended = 0

    def enqueue(self, group: list[Call]) -> None:
        self._groups.put(group)

    def stop(self) -> list[Call]:
        return self._groups.close(self._concurrency)

    def work(self) -> None:
        """The life of one thread: ends after `close`, and the last one to end reports idle."""
        while group := self._groups.take():
            frames = self._execute(group) if self.handler.batch is None else self._execute_batch(group)
            self.forget(group)
            self.send(frames)
        with self._lock:
            self._ended += 1
            last = self._ended == self._concurrency
        if last:
            self._loop.call_soon_threadsafe(self._on_idle)

    def _execute(self, group: list[Call]) -> list[bytes]:
        calls, events, frames = self.decode(group)
        if not calls:
            return frames
        started_s = time.monotonic()
        try:
            with self._gate():
                if self.handler.kind.streaming:
                    return frames + self._stream(calls[0], events, started_s)
                return frames + self.results(
                    calls, self.handler.call(*self.arguments(calls, events)), started_s
                )
        except BaseException as error:  # noqa: BLE001  whatever the handler raises is its caller's to know, not this thread's end
            return frames + self.failures(calls, error)

    def _execute_batch(self, group: list[Call]) -> list[bytes]:
        course = Course(self, group)
        while calls := course.take():
            started_s = time.monotonic()
            try:
                with self._gate():
                    answer = self.handler.call(*self.arguments(calls, [call.event for call in calls]))
            except BaseException as error:  # noqa: BLE001  as above
                course.fail(calls, error)
            else:
                course.answer(calls, answer, started_s)
        return course.frames

    def _stream(self, call: Call, events: list[Any], started_s: float) -> list[bytes]:
        pieces: Iterator[Any] = self.handler.call(*self.arguments([call], events))
        try:
            for piece in pieces:
                frame = self.chunk(call, piece)
                if not self._may_send(call, self.chunk_bytes(frame)):
                    return [self.failed(call, Cancelled("The caller went away while the handler streamed."))]
                self._link.send_encoded(frame)
        finally:
            _close(pieces)
        return [self.end(call, started_s)]

    def _may_send(self, call: Call, size: int) -> bool:
        remaining_ms = call.context.remaining_ms()
        timeout_s = None if remaining_ms is None else remaining_ms / 1000
        granted = call.credit is None or call.credit.spend(size, timeout_s)
        return granted and not call.cancellation.flag


def _close(pieces: Iterator[Any]) -> None:
    close = getattr(pieces, "close", None)
    if close is not None:
        close()

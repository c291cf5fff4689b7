"""Async handlers and async generators run on the worker's event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson

from ...errors import Cancelled
from ...handlers.handler import Handler
from ..batching.prefetch import window
from ..link.link import FrameKind, Link
from .batch_run import Course
from .runner import Call, Runner


class LoopRunner(Runner):
    """Async handlers and async generators: up to `concurrency` tasks at a time."""

    def __init__(
        self,
        handler: Handler,
        root: Path,
        link: Link,
        concurrency: int,
        on_idle: Callable[[], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        super().__init__(handler, root, link, concurrency, on_idle)
        self._tasks = tasks
        self._queue: deque[list[Call]] = deque()
        self._running = 0
        self._closed = False

    def enqueue(self, group: list[Call]) -> None:
        self._queue.append(group)
        self._dispatch()

    def stop(self) -> list[Call]:
        self._closed = True
        left = [call for group in self._queue for call in group]
        self._queue.clear()
        self._report_idle()
        return left

    def cancel(self, channel: int) -> None:
        super().cancel(channel)
        call = self._calls.get(channel)
        if call is None or call.task is None:
            return
        if all(other.cancellation.flag for other in call.company):  # else it goes on for the others
            call.task.cancel()

    def resize(self, concurrency: int) -> None:
        if concurrency == self._concurrency:
            return
        self._concurrency = concurrency
        # Never fewer than before: of those at a worker that dies, too many counted as begun fail, too few run twice.
        self.slots = max(self.slots, concurrency)
        self.window = concurrency if self.handler.batch else window(concurrency, self._exec_s)
        self._link.send(FrameKind.WINDOW, 0, orjson.dumps({"window": self.window, "slots": self.slots}))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._queue and self._running < self._concurrency:
            self._running += 1
            self._tasks.create_task(self._execute(self._queue.popleft()))

    async def _execute(self, group: list[Call]) -> None:
        try:
            frames = await (self._run(group) if self.handler.batch is None else self._run_batch(group))
        finally:
            self._running -= 1
            self.forget(group)
        self.send(frames)
        self._dispatch()
        self._report_idle()

    async def _run(self, group: list[Call]) -> list[bytes]:
        calls, events, frames = self.decode(group)
        if not calls:
            return frames
        calls[0].task = asyncio.current_task()  # from here on `cancel` may interrupt it
        started_s = time.monotonic()
        try:
            if self.handler.kind.streaming:
                await self._stream(calls[0], events)
                return [*frames, self.end(calls[0], started_s)]
            answer = await self.handler.call(*self.arguments(calls, events))
            return frames + self.results(calls, answer, started_s)
        except asyncio.CancelledError as error:
            if calls[0].task is None or not calls[0].cancellation.flag:
                return frames + self.failures(calls, error)  # something inside the handler was cancelled
            # `cancel` did this for the caller; the task itself goes on to say so.
            calls[0].task.uncancel()
            gone = Cancelled("The caller went away; the handler was cancelled.")
            return [*frames, self.failed(calls[0], gone)]
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  whatever the handler raises is its caller's to know
            return frames + self.failures(calls, error)

    async def _run_batch(self, group: list[Call]) -> list[bytes]:
        course = Course(self, group)
        while calls := course.take():
            await self._call(course, calls)
        return course.frames

    async def _call(self, course: Course, calls: list[Call]) -> None:
        task = asyncio.current_task()
        for call in calls:
            call.task, call.company = task, calls
        started_s = time.monotonic()
        try:
            answer = await self.handler.call(*self.arguments(calls, [call.event for call in calls]))
        except asyncio.CancelledError as error:
            if all(call.cancellation.flag for call in calls):
                course.end(calls, Cancelled("The callers went away; the handler was cancelled."))
            else:
                course.fail(calls, error)  # something inside the handler was cancelled
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  as above
            course.fail(calls, error)
        else:
            course.answer(calls, answer, started_s)
        for call in calls:
            call.task, call.company = None, ()
        if task is not None and task.cancelling() and all(call.cancellation.flag for call in calls):
            task.uncancel()  # that was for these callers; the rest of the group goes on in the same task

    async def _stream(self, call: Call, events: list[Any]) -> None:
        pieces: AsyncIterator[Any] = self.handler.call(*self.arguments([call], events))
        try:
            async for piece in pieces:
                frame = self.chunk(call, piece)
                if call.credit is not None:
                    await call.credit.spend_async(self.chunk_bytes(frame))
                self._link.send_encoded(frame)
        finally:
            if inspect.isasyncgen(pieces):
                await pieces.aclose()

    def _report_idle(self) -> None:
        if self._closed and self._running == 0:
            self._on_idle()

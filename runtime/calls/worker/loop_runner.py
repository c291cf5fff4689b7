"""Runs async handlers and async generators on the worker's event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from ....errors import Cancelled
from . import output
from .batch_run import BatchRun
from .call import Call
from .runner import Runner

# The longest time for which an answer waits for other answers of the same turn of the event loop.
JOIN_S = 0.001


@dataclass(eq=False)
class LoopRunner(Runner):
    """Runs up to `concurrency` groups at a time, each in its own task."""

    tasks: asyncio.TaskGroup
    _queue: deque[list[Call]] = field(default_factory=deque, init=False)
    _running: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)
    _joined: list[bytes] = field(default_factory=list, init=False)
    _joined_s: float = field(default=0.0, init=False)

    def send(self, frames: list[bytes]) -> None:
        """Send frames. If the handler exchanges pieces with callers, send the frames of a turn of the event loop together,
        within JOIN_S.

        Then the gateway wakes up once for the answers of many short calls. An answer may be sent after another call has
        started. This does no harm, because no call waits for a slot in such a worker (see the module `runner`).
        """
        if not self.handler.exchanges:
            super().send(frames)
            return
        now_s = time.monotonic()
        if not self._joined:
            self._joined_s = now_s
            asyncio.get_running_loop().call_soon(self._send_joined)
        self._joined += frames
        if now_s - self._joined_s > JOIN_S:
            self._send_joined()

    def _send_joined(self) -> None:
        frames, self._joined = self._joined, []
        super().send(frames)

    def enqueue(self, group: list[Call]) -> None:
        self._queue.append(group)
        self._start_groups()

    def empty(self) -> list[Call]:
        left = [call for group in self._queue for call in group]
        self._queue.clear()
        return left

    def stop(self) -> list[Call]:
        self._closed = True
        left = self.empty()
        self._report_idle()
        return left

    def cancel(self, channel: int) -> None:
        super().cancel(channel)
        call = self._calls.get(channel)
        if call is None or call.task is None or call.exchange is not None:
            return
        if all(peer.cancellation.flag for peer in call.peers):
            call.task.cancel()

    def resize(self, concurrency: int) -> None:
        if concurrency == self.concurrency:
            return
        self.concurrency = concurrency
        self.limits.resize(concurrency)
        self._start_groups()

    def _start_groups(self) -> None:
        while self._queue and self._running < self.concurrency:
            self._running += 1
            self.tasks.create_task(self._execute(self._queue.popleft()))

    async def _execute(self, group: list[Call]) -> None:
        try:
            frames = await (self._run(group) if self.handler.batch is None else self._run_batch(group))
            if self.answers.suspicious:
                await asyncio.to_thread(self.probe_if_suspected)
        finally:
            self._running -= 1
            if output.unfinished:
                output.finish(group)
            self.forget(group)
        self.send(frames)
        self._start_groups()
        self._report_idle()

    async def _run(self, group: list[Call]) -> list[bytes]:
        output.begin(group)
        self.tell_observers(group)
        calls, events, frames = self.answers.decode(group)
        if not calls:
            return frames
        # Set no peers: a list that holds the call itself would be a reference cycle, which only the garbage collector
        # frees.
        calls[0].set_task(asyncio.current_task())
        arguments = self.handler.arguments(calls[0].context, events[0])
        started_s = self.started(calls)
        try:
            self.check()
            if self._streaming:
                await self._stream(calls[0], arguments)
                return [*frames, self.answers.end_frame(calls[0], started_s)]
            answer = await self.handler.call(*arguments)
            self.check()
            frames += self.limits.learn(self.concurrency, time.monotonic() - started_s)
            return frames + self.answers.result_frames(calls, answer, started_s)
        except asyncio.CancelledError as error:
            if not calls[0].cancellation.flag:
                # The caller did not cancel. Something inside the handler was cancelled, so the call fails.
                return frames + self.answers.failure_frames(calls, error)
            _uncancel()
            gone = Cancelled("The caller went away; the handler was cancelled.")
            return [*frames, self.answers.error_frame(calls[0], gone)]
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001  the caller gets the error
            return frames + self.answers.failure_frames(calls, error)

    async def _run_batch(self, group: list[Call]) -> list[bytes]:
        run = BatchRun(self, group)
        while calls := run.next_piece():
            output.begin(calls)
            self.tell_observers(calls)
            for call in calls:
                call.set_task(asyncio.current_task(), calls)
            await self._run_piece(run, calls)
            for call in calls:
                call.set_task(None)
            if all(call.cancellation.flag for call in calls):
                # Only the invocations of this piece were cancelled. The task goes on with the other pieces.
                _uncancel()
        return run.frames

    async def _run_piece(self, run: BatchRun, calls: list[Call]) -> None:
        started_s = self.started(calls)
        try:
            self.check()
            answer = await self.handler.call(*run.arguments(calls))
            self.check()
        except asyncio.CancelledError as error:
            if all(call.cancellation.flag for call in calls):
                run.give_up(calls, Cancelled("The callers went away; the handler was cancelled."))
            else:
                # Not all callers have cancelled. Something inside the handler was cancelled, so the handler call fails.
                run.fail(calls, error)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001
            run.fail(calls, error)
        else:
            run.succeed(calls, answer, started_s)

    async def _stream(self, call: Call, arguments: tuple[Any, ...]) -> None:
        chunks: AsyncIterator[Any] = self.handler.call(*arguments)
        try:
            async for chunk in chunks:
                frame, size = self.answers.chunk_frame(call, chunk)
                if call.credit is not None:
                    await call.credit.spend_async(size)
                self.check()
                self.link.send_encoded(frame)
        finally:
            if inspect.isasyncgen(chunks):
                await chunks.aclose()

    def _report_idle(self) -> None:
        if self._closed and self._running == 0:
            self.on_idle()


def _uncancel() -> None:
    """Let the current task go on after `LoopRunner.cancel` interrupted it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        task.uncancel()

"""Supervises the gateway's background tasks: a task that fails ends neither the gateway nor other tasks."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from types import TracebackType
from typing import Any, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")

# A task that must go on is started again after FIRST_RESTART_S, then after twice the delay each time, up to
# LAST_RESTART_S. If it ran for longer than STABLE_S, the next delay is FIRST_RESTART_S again.
FIRST_RESTART_S = 0.5
LAST_RESTART_S = 60.0
STABLE_S = 60.0
# How long running tasks may take to end after the parts of the gateway that they serve are closed.
END_S = 10.0


class BackgroundTasks(asyncio.TaskGroup):
    """A task group whose tasks may fail: each failure is logged with its traceback, and counted.

    A failed task ends with the result None. Code that needs the outcome must let its coroutine return it. At the end of
    the group, tasks have END_S to end. Then they are cancelled, because they may wait for a process that the kernel
    cannot end.
    """

    def __init__(self) -> None:
        super().__init__()
        self._running: set[asyncio.Task[Any]] = set()
        self.failures: Counter[str] = Counter()
        """The number of failures by task: the first word of the task's name, or the name of its function."""

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        """Run a coroutine once."""
        # Typed as Any, because a failed task has the result None, while the overridden method prescribes Task[T].
        run: Coroutine[Any, Any, Any] = self._guard(name, coro)
        task = super().create_task(run, name=name, context=context)
        self._running.add(task)
        task.add_done_callback(functools.partial(self._note_done, coro))
        return task

    def _note_done(self, coro: Coroutine[Any, Any, Any], task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            # Close the coroutine: it has never run if the task was cancelled before its first step, and Python would warn of it.
            coro.close()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                await self._end()
            except asyncio.CancelledError as cancelled:
                kind, error, trace = type(cancelled), cancelled, cancelled.__traceback__
        await super().__aexit__(kind, error, trace)

    async def _end(self) -> None:
        """Wait for the end of all tasks. Cancel the tasks that have not ended after END_S."""
        until_s = time.monotonic() + END_S
        # Look again after each wait, because a task may start another task.
        while self._running and (left_s := until_s - time.monotonic()) > 0:
            await asyncio.wait(self._running, timeout=left_s)
        for task in self._running:
            _log.error(
                "background task %s is cancelled: it had not ended after %.0f s", task.get_name(), END_S
            )
            task.cancel()

    def keep(self, run: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> asyncio.Task[None]:
        """Run `run()` until it returns. If it fails, run it again after a delay."""
        return self.create_task(self._repeat(name, run), name=name)

    async def complete(self, change: Coroutine[Any, Any, None]) -> None:
        """Await `change` and raise its error. If the caller is cancelled, `change` still goes on."""

        async def outcome() -> Exception | None:
            try:
                await change
            except Exception as error:  # noqa: BLE001  whatever it is, it belongs to the caller
                return error
            return None

        if error := await asyncio.shield(self.create_task(outcome())):
            raise error

    async def _guard(self, name: str | None, coroutine: Coroutine[Any, Any, T]) -> T | None:
        try:
            return await coroutine
        except Exception as error:  # noqa: BLE001  any failure of a task must leave the others alone
            self._report(_label(coroutine, name), error)
            return None

    async def _repeat(self, label: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
        delay_s = FIRST_RESTART_S
        while True:
            started_s = time.monotonic()
            try:
                return await run()
            except Exception as error:  # noqa: BLE001  it is logged and counted, and the task goes on
                self._report(label, error)
            if time.monotonic() - started_s > STABLE_S:
                delay_s = FIRST_RESTART_S
            await asyncio.sleep(delay_s)
            delay_s = min(LAST_RESTART_S, 2 * delay_s)

    def _report(self, label: str, error: Exception) -> None:
        self.failures[label] += 1
        _log.error("background task %s failed: %s: %s", label, type(error).__name__, error, exc_info=error)


def _label(coroutine: Coroutine[Any, Any, Any], name: str | None) -> str:
    """Return the label of a task's failures. There must be few labels, because each label is a time series."""
    if name:
        return name.partition(" ")[0]
    return str(getattr(coroutine, "__qualname__", type(coroutine).__name__))

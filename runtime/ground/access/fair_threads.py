"""Runs blocking work of several owners in threads of its own. Owners take turns. The last free thread is for an owner that uses no thread.

The event loop's default threads stay free for work that callers wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ....fair_queue import FairQueue

GATEWAY = "gateway"
"""The owner of the gateway's own work. No API key has this id."""
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Work:
    """Work, and its result for the task that waits for it."""

    tenant: str
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    running: asyncio.Future[Any] | None = None
    priority: int = 1
    deadline_s: float = 0.0


class FairThreads:
    """The threads, and the work that waits for a thread."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool, self._free = ThreadPoolExecutor(threads, name), threads
        self._waiting = FairQueue[_Work]()
        self._held = Counter[str]()

    async def run(
        self, work: Callable[[], T], *, owner: str = GATEWAY, undo: Callable[[T], object] | None = None
    ) -> T:
        """Run `work` in a thread and return its result. If the caller is cancelled before `work` begins, `work` never runs.
        If the caller is cancelled later, `work` goes on, and `undo` is called with its result.
        """
        own = _Work(owner, work, asyncio.get_running_loop().create_future())
        self._waiting.add(own)
        self._start()
        try:
            result: T = await own.result
        except asyncio.CancelledError:
            self._waiting.remove(own)
            if own.running is not None and undo is not None:
                own.running.add_done_callback(partial(self._undo, undo))
            raise
        finally:
            # The traceback of an error refers to this frame, and `own` refers to the error. Break this cycle.
            del own
        return result

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in a thread, and drop its result. If the threads are closed, do nothing."""
        # RuntimeError: the threads are closed. Skip the work: the next gateway empties the staging folder.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(work)

    def close(self) -> None:
        """Start no more work, and cancel work that waits. The process waits at its end for work that still runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for one in [*self._waiting]:
            self._waiting.remove(one)
            one.result.cancel()

    def _start(self) -> None:
        while self._free and (found := self._next()) is not None:
            self._waiting.charge(found.tenant, found.priority, 1)
            self._waiting.remove(found)
            try:
                found.running = found.result.get_loop().run_in_executor(self._pool, found.work)
            except RuntimeError as error:
                # The process may have no more threads. Fail only this work, and go on with the work of other owners.
                if not found.result.done():
                    found.result.set_exception(error)
                continue
            self._free -= 1
            self._held[found.tenant] += 1
            found.running.add_done_callback(partial(self._ended, found))

    def _next(self) -> _Work | None:
        """Return the next work of the least served owner that may use one more thread; None if there is none."""
        may = (one for one in self._waiting.heads() if self._free > 1 or not self._held[one.tenant])
        return min(may, key=lambda one: self._waiting.served(one.tenant, one.priority), default=None)

    def _ended(self, own: _Work, running: asyncio.Future[Any]) -> None:
        self._free += 1
        self._held[own.tenant] -= 1
        if not self._held[own.tenant]:
            del self._held[own.tenant]
        if own.result.done():
            # The caller was cancelled. Retrieve the error, so that asyncio does not log it.
            _ = running.cancelled() or running.exception()
        elif running.cancelled():
            own.result.cancel()
        elif (error := running.exception()) is not None:
            own.result.set_exception(error)
        else:
            own.result.set_result(running.result())
        self._start()

    def _undo(self, undo: Callable[[T], object], running: asyncio.Future[T]) -> None:
        if not running.cancelled() and running.exception() is None:
            self.start(partial(undo, running.result()))

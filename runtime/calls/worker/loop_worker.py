"""A worker of an async handler: hooks, handler and link share one event loop on the main thread, so that no call changes threads."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import uvloop

from ....handlers.handler import Hook
from ..leftovers import fork_safety
from ..link.connection import Link
from .loop_runner import LoopRunner
from .owned_thread import start_thread
from .worker import RELEASE_TIMEOUT_S, Worker, exit_at_once


class LoopWorker(Worker):
    """Runs an async handler."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._drained, self._released = asyncio.Event(), asyncio.Event()
        # True if the worker ends without having been set up.
        self._left = False

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self._event_loop = loop = asyncio.get_running_loop()
        link = Link(self._connection.sock)
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            runner = LoopRunner(
                self._handler, self._spec.code, link, self._spec.concurrency, self._drained.set, tasks, **self._runner_options()
            )  # fmt: skip
            self._assemble(link, loop, runner)
            loop.add_signal_handler(signal.SIGTERM, self._drain)
            self._share_signals(signal.getsignal(signal.SIGTERM), lambda: None)
            link.bind(self._on_frame, exit_at_once)
            fork_safety.set_threads(self._built.threads)
            self._preparing = tasks.create_task(self._prepare())
            await self._drained.wait()
            if not self._left:
                await asyncio.to_thread(self._parking.wait_ended)
                await self.hooks.tear_down(self._parking.restore)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_TIMEOUT_S):
                    await self._released.wait()
        self._finish()

    def _pin(self) -> None:
        start_thread(super()._pin, "pin")

    def _activate(self, head: dict[str, Any]) -> None:
        super()._activate(head)
        # `setup` runs on the loop, because the handler's calls run there too. Torch keeps its thread count separately for each
        # thread that calls it, so a count set on another thread would not apply to these calls. `setup` may block the loop,
        # which has nothing else to do before READY.
        self._tasks.create_task(self._begin())

    async def _begin(self) -> None:
        await self._preparing
        if await self._set_up():
            await self._become_ready()
        else:
            self._leave()

    def _call_from_thread(self, hook: Hook | None) -> Any:
        return asyncio.run_coroutine_threadsafe(self.hooks.call(hook), self._event_loop).result()

    def _release(self) -> None:
        self._released.set()

    def _leave(self) -> None:
        self._left = True
        self._released.set()
        self._drained.set()

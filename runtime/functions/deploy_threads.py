"""Threads for work on files that may take minutes, such as the installation of requirements.

The event loop's default threads stay free for work that callers wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

DEPLOY_THREADS = 4
"""The deploys that work on files at a time."""

T = TypeVar("T")


class DeployThreads:
    """The threads of all deploys of one gateway."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(DEPLOY_THREADS, "deploy")

    async def run(self, work: Callable[[], T], *, undo: Callable[[T], object] | None = None) -> T:
        """Run `work` in a thread and return its result. If the caller is cancelled, call `undo` with the result."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)

        def undone(done: asyncio.Future[T]) -> None:
            if undo is not None and not done.cancelled() and done.exception() is None:
                result = done.result()
                self.start(lambda: undo(result))

        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            running.add_done_callback(undone)
            raise

    def start(self, work: Callable[[], object]) -> None:
        """Run `work` in a thread, if the gateway does not end. Its result is dropped."""
        # RuntimeError: the threads are closed. The next gateway empties the staging folder.
        with contextlib.suppress(RuntimeError):
            self._pool.submit(work)

    def close(self) -> None:
        """Start no more work. Before the process ends, it waits for work that still runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)

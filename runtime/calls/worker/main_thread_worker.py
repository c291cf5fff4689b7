"""A worker of a plain handler: hooks and handler on the main thread, the link on a thread of its own.

So the handler has what a script has: signals, `asyncio.get_event_loop`, and the state that its import has left on this thread.
Cancels, drains and credits go on while it runs, even in native code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any

from ....handlers.handler import Hook
from ..leftovers import fork_safety
from ..leftovers.thread_state import ThreadState
from ..link.connection import Link
from ..link.poll_loop import PollLoop
from .function_setup import run_without_loop
from .start import WorkerStart
from .thread_runner import ThreadRunner
from .worker import RELEASE_TIMEOUT_S, Worker


class MainThreadWorker(Worker):
    """Runs a plain handler."""

    def __init__(self, start: WorkerStart) -> None:
        super().__init__(start)
        self._idle, self._released = threading.Event(), threading.Event()

    def run(self) -> None:
        loop = PollLoop(self._on_signal)
        link = Link(self._start.sock, loop=loop)
        runner = ThreadRunner(
            self._handler, self._spec.code, link, self._spec.concurrency, self._idle.set, self._weights.gate, **self._runner_options()
        )  # fmt: skip
        self._assemble(link, loop, runner)
        self._own_signals(lambda: self._watch_sigterm(loop), loop.close_in_fork)
        link.bind(self._on_frame, self._on_lost)
        thread = threading.Thread(target=self._serve_link, args=(loop,), name="link", daemon=True)
        thread.start()
        self._serve_calls(runner)
        loop.stop()
        thread.join()
        self._finish()

    def _watch_sigterm(self, loop: PollLoop) -> None:
        # The link's thread sees the signal at once. The main thread would run a handler of Python only after native code.
        signal.set_wakeup_fd(loop.signals, warn_on_full_buffer=False)
        # The function's code may replace the descriptor, as asyncio does.
        signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(self._drain))

    def _serve_link(self, loop: PollLoop) -> None:
        try:
            loop.run()
        except BaseException:  # noqa: BLE001  without its link, the worker is of no use
            traceback.print_exc()
            os._exit(1)

    def _serve_calls(self, runner: ThreadRunner) -> None:
        """Run hooks and calls until the worker has drained."""
        fork_safety.set_threads(self._built.threads)
        run_without_loop(self._prepare())
        self._activated.wait()
        if not run_without_loop(self._set_up()):
            return
        self._thread_state = ThreadState(self._built.threads)
        for number in range(1, self._spec.concurrency):
            threading.Thread(
                target=self._thread_state.run, args=(runner.work,), name=f"handler-{number}", daemon=True
            ).start()
        run_without_loop(self._become_ready())
        runner.work()
        self._idle.wait()
        self._parking.wait_ended()
        run_without_loop(self._hooks.tear_down(self._parking.restore))
        self._released.wait(RELEASE_TIMEOUT_S)

    def _call_from_thread(self, hook: Hook | None) -> Any:
        return self._thread_state.run(lambda: run_without_loop(self._hooks.call(hook)))

    # -- the thread of the link's loop

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._drain()

    def _release(self) -> None:
        self._released.set()

    def _leave(self) -> None:
        # The main thread may be in native code of a rehearsal.
        self._finish()
        sys.stdout.flush()
        os._exit(0)

"""A worker of a plain handler: hooks and handler on the main thread, the link on a thread of its own.

So the handler has what a script has: signals, `asyncio.get_event_loop`, and the state that its import has left on this thread.
The link handles cancels, drains and credits while the handler runs, even while it runs native code.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import traceback
from functools import partial
from typing import Any

from ....handlers.handler import Hook
from ..leftovers import fork_safety
from ..leftovers.thread_state import ThreadState
from ..link.connection import Link
from ..link.poll_loop import PollLoop
from .function_setup import run_without_loop
from .owned_thread import start_thread
from .thread_runner import ThreadRunner
from .worker import RELEASE_TIMEOUT_S, Worker, exit_at_once


class MainThreadWorker(Worker):
    """Runs a plain handler."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._idle, self._released, self._loop_ended = threading.Event(), threading.Event(), threading.Event()
        self._poll_loop = loop = PollLoop(self._on_signal)
        link = Link(None, loop=loop)
        self._threads = ThreadRunner(
            self._handler, self._spec.code, link, self._spec.concurrency, self._idle.set, self._weights.gate,
            **self._runner_options(),
        )  # fmt: skip
        self._assemble(link, loop, self._threads)

    def _serve(self) -> None:
        loop = self._poll_loop
        loop.open()
        self._link.connect(self._connection.sock)
        # Report signals to the link's thread, which handles them at once. The main thread runs no signal handler during native code.
        signal.set_wakeup_fd(loop.signals, warn_on_full_buffer=False)
        # Also set a handler, because the function's code may replace the wakeup descriptor, as asyncio does.
        signal.signal(signal.SIGTERM, self._on_term)
        self._share_signals(self._on_term, loop.close_in_fork)
        self._link.bind(self._on_frame, exit_at_once)
        # Use no `threading.Thread`: this thread starts sooner, and the function's code does not see it.
        _thread.start_new_thread(self._serve_link, (loop,))
        self._serve_calls()
        loop.stop()
        self._loop_ended.wait()
        self._finish()

    def _serve_link(self, loop: PollLoop) -> None:
        try:
            loop.run()
            self._loop_ended.set()
        except Exception:  # noqa: BLE001  without its link, the worker is of no use
            traceback.print_exc()
            os._exit(1)

    def _on_term(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._drain)

    def _serve_calls(self) -> None:
        """Run hooks and calls until the worker has drained."""
        fork_safety.set_threads(self._built.threads)
        run_without_loop(self._prepare())
        self._activated.wait()
        if not run_without_loop(self._set_up()):
            return
        self._thread_state = ThreadState(self._built.threads)
        for number in range(1, self._spec.concurrency):
            start_thread(partial(self._thread_state.run, self._threads.work), f"handler-{number}")
        run_without_loop(self._become_ready())
        self._threads.work()
        self._idle.wait()
        self._parking.wait_ended()
        run_without_loop(self.hooks.tear_down(self._parking.restore))
        self._released.wait(RELEASE_TIMEOUT_S)

    def _call_from_thread(self, hook: Hook | None) -> Any:
        return self._thread_state.run(lambda: run_without_loop(self.hooks.call(hook)))

    # -- the thread of the link's loop

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            self._drain()

    def _release(self) -> None:
        self._released.set()

    def _leave(self) -> None:
        # Exit from this thread, because the main thread may be in native code of a rehearsal.
        self._finish()
        sys.stdout.flush()
        os._exit(0)

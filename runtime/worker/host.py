"""What handlers may ask of their worker, from any thread: progress, retirement, concurrency."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ...errors import OutputInvalid
from ...handlers.codec import JSON_TYPE, OutputCodec
from ..link.connection import Link
from ..link.frames import FrameKind
from .runner import Runner

# A handler may report progress in its innermost loop. Within this interval only the latest report is sent.
PROGRESS_INTERVAL_S = 0.05
MAX_CONCURRENCY = 1024
# The event loop has no long work to do. If it does not respond in this time, the process is lost.
LOOP_TIMEOUT_S = 10.0


class WorkerHost:
    """The host of one worker. Made on the event loop's thread."""

    def __init__(
        self, link: Link, loop: asyncio.AbstractEventLoop, runner: Runner, drain: Callable[[], None]
    ) -> None:
        self._link = link
        self._loop = loop
        self._runner = runner
        self._drain = drain
        self._loop_thread = threading.get_ident()
        self._codec = OutputCodec(None)
        self._lock = threading.Lock()
        self._latest: dict[int, bytes] = {}
        self._waiting = False

    def progress(self, channel: int, value: Any) -> None:
        """Report the progress of a channel. Raise OutputInvalid if `value` is not JSON."""
        payload, kind = self._codec.encode(value)
        if kind != JSON_TYPE:
            raise OutputInvalid("Progress must be JSON, this is bytes.", remedy="Decode the bytes.")
        with self._lock:
            if self._link.closed:
                return
            if self._waiting:
                self._latest[channel] = payload
                return
            self._waiting = True
            self._link.send(FrameKind.PROGRESS, channel, b"", payload)
        self._loop.call_soon_threadsafe(self._loop.call_later, PROGRESS_INTERVAL_S, self._flush)

    def retire(self) -> None:
        """Take nothing new, and end once everything that runs has been answered."""
        self._on_loop(self._drain)

    def resize(self, concurrency: int) -> None:
        """Run `concurrency` invocations at the same time, if the handler is async."""
        self._on_loop(lambda: self._runner.resize(min(max(1, concurrency), MAX_CONCURRENCY)))

    def _on_loop(self, act: Callable[[], None]) -> None:
        """Call `act` on the event loop and wait for it: after `retire` this thread takes no more work."""
        if threading.get_ident() == self._loop_thread:
            act()
            return
        done = threading.Event()

        def act_and_signal() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(act_and_signal)
        done.wait(LOOP_TIMEOUT_S)

    def _flush(self) -> None:
        with self._lock:
            latest, self._latest = self._latest, {}
            self._waiting = bool(latest)
            for channel, payload in latest.items():
                self._link.send(FrameKind.PROGRESS, channel, b"", payload)
        if latest:
            self._loop.call_later(PROGRESS_INTERVAL_S, self._flush)

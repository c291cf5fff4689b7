"""The host: what a worker does for the invocations that it runs, when their handlers ask. Any thread may ask."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from ...errors import OutputInvalid
from ...handlers.codec import JSON_TYPE, OutputCodec
from ..link.link import FrameKind, Link
from .runner import Runner

# A handler may say how far it is in its innermost loop: within so long only the last word is sent.
PACE_S = 0.05
MAX_CONCURRENCY = 1024
# The loop has no long work to do: if it does not come to it in this time, the process is lost anyway.
LOOP_TIMEOUT_S = 10.0


class WorkerHost:
    """Made on the event loop's thread, of one worker."""

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
        self._held: dict[int, bytes] = {}
        self._pacing = False

    def progress(self, channel: int, value: Any) -> None:
        """Tells the gateway. Raises OutputInvalid if `value` is not JSON."""
        payload, kind = self._codec.encode(value)
        if kind != JSON_TYPE:
            raise OutputInvalid("Progress must be JSON, this is bytes.", remedy="Decode the bytes.")
        with self._lock:
            if self._link.closed:
                return
            if self._pacing:
                self._held[channel] = payload
                return
            self._pacing = True
            self._link.send(FrameKind.PROGRESS, channel, b"", payload)
        self._loop.call_soon_threadsafe(self._rest)

    def retire(self) -> None:
        """The worker takes nothing more from now on, and ends once it has answered what runs."""
        self._on_loop(self._drain)

    def resize(self, concurrency: int) -> None:
        """The worker runs so many at the same time, if its handler is async."""
        wanted = min(max(1, concurrency), MAX_CONCURRENCY)
        self._on_loop(lambda: self._runner.resize(wanted))

    def _on_loop(self, act: Callable[[], None]) -> None:
        """Done when this returns: a thread that goes on must not take what it should not any more."""
        if threading.get_ident() == self._loop_thread:
            act()
            return
        done = threading.Event()

        def acted() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(acted)
        done.wait(LOOP_TIMEOUT_S)

    def _rest(self) -> None:
        self._loop.call_later(PACE_S, self._flush)

    def _flush(self) -> None:
        with self._lock:
            held, self._held = self._held, {}
            self._pacing = bool(held)
            for channel, payload in held.items():
                self._link.send(FrameKind.PROGRESS, channel, b"", payload)
        if held:
            self._rest()

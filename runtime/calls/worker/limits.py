"""How many invocations a worker may hold and run, and how many events one handler call may have, as the gateway knows them."""

from __future__ import annotations

import threading

from ....handlers.handler import Handler
from ..batching.prefetch import window
from ..link.connection import Link
from ..link.frames import FrameKind

# The weight of the newest duration in the moving average of durations.
SMOOTHING = 0.2


class Limits:
    """The limits of one worker. READY reports the first ones, and WINDOW frames report changes."""

    def __init__(self, handler: Handler, link: Link, concurrency: int) -> None:
        self._handler, self._link = handler, link
        self._lock = threading.Lock()
        self._exec_s: float | None = None
        self.slots = self.window = concurrency
        self.limit = handler.batch.max_size if handler.batch else 1
        """The largest number of events in one handler call. It is lowered when memory runs out. READY reports the first one."""

    def shrink(self, size: int) -> None:
        """Halve the limit, because memory did not suffice for `size` events in one handler call."""
        with self._lock:
            self._set(max(1, min(self.limit, size) // 2))

    def regrow(self, limit: int) -> None:
        """Raise the limit back to `limit`: one event alone was too large, so smaller batches do not help."""
        with self._lock:
            if self.limit < limit:
                self._set(limit)

    def learn(self, concurrency: int, exec_s: float) -> None:
        """Update the average duration of a call, and tell the gateway if the window changes with it."""
        if self._handler.exchanges:
            return
        known = self._exec_s
        self._exec_s = exec_s if known is None else known + SMOOTHING * (exec_s - known)
        wanted = window(concurrency, self._exec_s)
        if wanted != self.window:
            self.window = wanted
            self._link.send_json(FrameKind.WINDOW, 0, {"window": wanted})

    def resize(self, concurrency: int) -> None:
        """Let the gateway send as many invocations as `concurrency` groups at a time need."""
        # `slots` tells the gateway how many groups may have started. It never decreases: if this worker dies, only the
        # groups beyond that number run on another worker, so that no group runs twice.
        self.slots = max(self.slots, concurrency)
        whole = self._handler.batch is not None or self._handler.exchanges
        self.window = concurrency if whole else window(concurrency, self._exec_s)
        self._link.send_json(FrameKind.WINDOW, 0, {"window": self.window, "slots": self.slots})

    def _set(self, limit: int) -> None:
        self.limit = limit
        self._link.send_json(FrameKind.WINDOW, 0, {"window": self.window, "limit": limit})

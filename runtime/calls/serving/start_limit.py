"""Ends a start of a worker that makes no progress, or that takes very long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..link.child import Child

# A start that makes progress may take this many times `silent_s`.
MOST_TIMES = 4
# When to check the progress first. Most starts end earlier, and need no check.
FIRST_LOOK_S = 1.0


class StartLimit:
    """The limit of one start. Without it, a worker that hangs while it starts would count as starting for ever."""

    def __init__(
        self, child: Child, silent_s: float, progress: Callable[[], object], *, later_s: float = 0.0
    ) -> None:
        """The worker is killed if `progress()` does not change for `silent_s`, and in any case after MOST_TIMES * `silent_s`.

        Both times are longer by `later_s`, in which fetched weights arrive.
        """
        self._child, self._progress = child, progress
        self._silent_s, self._most_s = silent_s + later_s, MOST_TIMES * silent_s + later_s
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._last: object = None
        self._timer = self._loop.call_later(min(FIRST_LOOK_S, silent_s / 2), self._look)

    def _look(self) -> None:
        took_s, now = self._loop.time() - self._began_s, self._progress()
        if now != self._last and (left_s := self._most_s - took_s) > 0:
            self._last = now
            self._timer = self._loop.call_later(min(self._silent_s, left_s), self._look)
        else:
            self._child.kill_stuck(f"it was not ready after {took_s:.0f} s (start_timeout_s)")

    def end(self) -> None:
        """End the limit, because the worker is ready, or ends."""
        self._timer.cancel()

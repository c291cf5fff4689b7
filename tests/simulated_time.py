"""An event loop in simulated time: instead of waiting, it advances its clock to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

# Timers fire late by this time, as on a real machine. A timer never fires before its time.
LATE_S = 1e-6
# The simulated wall clock is ahead of the simulated monotonic clock by this time: it begins at 22:13:20 UTC.
EPOCH_S = 1_700_000_000.0
T = TypeVar("T")


class SimulatedTime(selectors.DefaultSelector):
    """Advances the clock to the next timer. No events arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.runs = 0
        """How often the loop has run since the last advance of the clock."""
        self.on_quiet: Callable[[], bool] = lambda: False
        """Called when nothing is left to do at the present time. It returns True if it has scheduled a
        callback.
        """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.runs += 1
        if timeout is None or timeout > 0:
            if self.on_quiet():
                return []
            assert timeout is not None, "the test waits, and no timer is set"
            self.now_s += timeout + LATE_S
            self.runs = 0
        return []


class SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = SimulatedTime()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s

    def wall_time(self) -> float:
        """Return Unix seconds."""
        return EPOCH_S + self.clock.now_s


def run_simulated(main: Coroutine[Any, Any, T], loop: SimulatedLoop | None = None) -> T:
    """Run a coroutine in simulated time. `time.monotonic` and `time.time` return the simulated time, too."""
    there = loop or SimulatedLoop()
    with (
        asyncio.Runner(loop_factory=lambda: there) as runner,
        mock.patch("time.monotonic", there.time),
        mock.patch("time.time", there.wall_time),
    ):
        return runner.run(main)

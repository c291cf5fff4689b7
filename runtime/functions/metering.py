"""Measures how much memory and disk functions hold, a moment after that may have changed and while workers run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean

from ..telemetry.background import BackgroundTasks
from ..telemetry.usage import GB, Holding
from .live import Live, Process
from .registry import Functions

# A function is measured this long after a worker got ready or a deploy, and every EVERY_S while it has workers.
SETTLE_S = 1.0
EVERY_S = 60.0
_MIB = 1 << 20


class Metering:
    """Tells the accounts of all functions how much these hold. Measuring takes system calls, so it is done in threads."""

    def __init__(self, functions: Functions, tasks: BackgroundTasks) -> None:
        self._functions, self._tasks = functions, tasks
        # By function: when it is measured next, and the timer for that.
        self._timers: dict[str, tuple[float, asyncio.TimerHandle]] = {}
        # By function: the live revision when its files were measured, and the size of all its revisions.
        self._sizes: dict[str, tuple[str, float]] = {}

    def note_change(self, function: str, *_: str) -> None:
        """Measure a function soon: a worker is ready, or it was deployed. Other arguments are ignored."""
        self._measure_in(SETTLE_S, function)

    def forget(self, function: str) -> None:
        """A function was deleted."""
        self._sizes.pop(function, None)
        if (planned := self._timers.pop(function, None)) is not None:
            planned[1].cancel()

    def close(self) -> None:
        for function in list(self._timers):
            self.forget(function)

    def _measure_in(self, delay_s: float, function: str) -> None:
        loop, planned = asyncio.get_running_loop(), self._timers.get(function)
        due_s = loop.time() + delay_s
        if planned is not None:
            if planned[0] <= due_s:
                return
            planned[1].cancel()
        self._timers[function] = due_s, loop.call_later(delay_s, self._start, function)

    def _start(self, function: str) -> None:
        del self._timers[function]
        live = next((one for one in self._functions.all() if one.record.function == function), None)
        if live is not None:
            self._tasks.create_task(self._measure(function, live))

    async def _measure(self, function: str, live: Live) -> None:
        processes, disk_gb = await live.processes(), await self._disk_gb(function, live.record.revision)
        account = live.revision.history.account
        account.measured(_holding(account.holding, processes, disk_gb, live.devices))
        if live.revision.pool.replicas:
            self._measure_in(EVERY_S, function)

    async def _disk_gb(self, function: str, revision: str) -> float:
        """Return the size of all stored revisions. Weights that several functions share count for each."""
        if self._sizes.get(function, ("", 0.0))[0] != revision:
            sizes: Callable[[str], dict[str, int]] = self._functions.store.sizes
            found = await asyncio.to_thread(sizes, function)
            self._sizes[function] = revision, sum(found.values()) / GB
        return self._sizes[function][1]


def _holding(before: Holding, processes: list[Process], disk_gb: float, devices: float) -> Holding:
    """Return what a function holds. What has just ended is what it was when it was measured before."""
    workers = [process.pss_mb * _MIB / GB for process in processes if process.role == "worker"]
    rest = [process.pss_mb * _MIB / GB for process in processes if process.role != "worker"]
    return Holding(
        worker_gb=fmean(workers) if workers else before.worker_gb,
        rest_gb=sum(rest) if rest else before.rest_gb,
        disk_gb=disk_gb,
        devices=devices if workers else before.devices,
    )

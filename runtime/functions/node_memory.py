"""Measures the memory of all processes of this node: of functions, of the bases, and of the gateway.

Memory is PSS (proportional set size): each page divided by the number of processes that map it. So the sum counts a
shared page once. All processes are measured together, because the share of each changes when another starts or ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..telemetry.background import BackgroundTasks
from .registry import Functions

GATEWAY, BASES = "(gateway)", "(bases)"
"""The names under which the memory of no single function is shown. No function can have such a name."""
# The accounts repeat a measurement at the earliest after this multiple of the processor time that it took, which is
# 2 % of one core. For a caller who asks, while the processes are the same, it is 10 %, and a second at least.
PAUSE, ASKED_PAUSE = 50.0, 10.0
FRESH_S = 1.0
# Reading the memory map of a process with torch takes about 10 ms, in which a fork of it waits. So a worker that
# starts ends a measurement, unless the last complete one is older than this.
OLDEST_S = 60.0
# How long a caller of `latest` waits for a new measurement before they get the last one.
WAIT_S = 2.0


@dataclass(slots=True)
class FunctionMemory:
    """The memory of one function's processes, those of revisions that are not live included."""

    workers: int = 0
    workers_bytes: int = 0
    rest_bytes: int = 0
    """Memory of zygotes and standbys."""

    @property
    def total_bytes(self) -> int:
        return self.workers_bytes + self.rest_bytes

    def add(self, role: str, held_bytes: int) -> None:
        """Add a process."""
        if role == "worker":
            self.workers += 1
            self.workers_bytes += held_bytes
        else:
            self.rest_bytes += held_bytes


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """One measurement of all processes."""

    gateway_bytes: int
    """Memory of the gateway and its fetcher."""
    bases_bytes: int
    functions: Mapping[str, FunctionMemory]
    measured_at: float
    """In Unix seconds."""

    @property
    def functions_bytes(self) -> int:
        return sum(one.total_bytes for one in self.functions.values())

    @property
    def total_bytes(self) -> int:
        return self.gateway_bytes + self.bases_bytes + self.functions_bytes


class MemoryMeter:
    """Measures the node's memory, process by process, in threads."""

    def __init__(self, functions: Functions, tasks: BackgroundTasks) -> None:
        self._functions, self._tasks = functions, tasks
        self._last: NodeMemory | None = None
        # When the last complete measurement ended; when the last one ended, and its processor time.
        self._measured_s, self._ended_s, self._took_s = -math.inf, -math.inf, 0.0
        # Processes that have come or gone, and how many of them before the last complete measurement.
        self._changes = self._measured_changes = 0
        self._running: asyncio.Task[NodeMemory | None] | None = None
        functions.events.processes.append(self._note_change)

    def _note_change(self, _function: str) -> None:
        self._changes += 1

    @property
    def is_current(self) -> bool:
        """True if no process has come or gone since the last complete measurement began."""
        return self._measured_changes == self._changes

    @property
    def pause_s(self) -> float:
        """How long the next measurement should wait, because of the time that the last one took."""
        return max(0.0, self._ended_s + PAUSE * self._took_s - time.monotonic())

    async def latest(self) -> NodeMemory | None:
        """Return a new measurement, or the last one if it is recent or workers start. Return None if there is none yet."""
        changes, fresh_until_s = self._changes, self._measured_s + max(FRESH_S, ASKED_PAUSE * self._took_s)
        if changes == self._measured_changes and time.monotonic() < fresh_until_s:
            return self._last
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                # The measurement that runs already may have begun before the last change.
                while await self.measure() is not None and self._measured_changes < changes:
                    pass
        return self._last

    async def measure(self) -> NodeMemory | None:
        """Measure all processes. Return None if a worker starts meanwhile. Concurrent callers share a measurement."""
        if self._running is None:
            self._running = self._tasks.create_task(self._measure(), name="memory")
            self._running.add_done_callback(self._note_done)
        return await asyncio.shield(self._running)

    def _note_done(self, _task: asyncio.Task[NodeMemory | None]) -> None:
        self._running = None

    async def _measure(self) -> NodeMemory | None:
        started_s, began_changes, changes = time.monotonic(), self._changes, -1
        may_stop = started_s - self._measured_s < OLDEST_S
        sums, functions, self._took_s = Counter[str](), dict[str, FunctionMemory](), 0.0
        # A process that comes while these are measured is in the next measurement.
        for holder, pid, role in list(self._processes()):
            if may_stop and self._changes != changes:
                changes = self._changes
                if any(live.workers.replicas.starting for live in self._functions.running):
                    break
            held_bytes, took_s = await asyncio.to_thread(_timed_pss_bytes, pid)
            self._took_s += took_s
            if role:
                functions.setdefault(holder, FunctionMemory()).add(role, held_bytes)
            else:
                sums[holder] += held_bytes
        else:
            self._measured_s, self._measured_changes = time.monotonic(), began_changes
            self._last = NodeMemory(sums[GATEWAY], sums[BASES], functions, time.time())
        self._ended_s = time.monotonic()
        return self._last if self._measured_s >= started_s else None

    def _processes(self) -> Iterator[tuple[str, int, str]]:
        """Yield for each process who holds it, its pid, and its role in a function."""
        for pid in (os.getpid(), *self._functions.weights.pids):
            yield GATEWAY, pid, ""
        for pid in self._functions.launcher.base_pids():
            yield BASES, pid, ""
        for live in self._functions.running:
            for pid, role, _ in live.process_rows:
                yield live.record.function, pid, role


def pss_bytes(pid: int) -> int:
    """Return the PSS of a process. It is 0 if the process has ended or may not be measured."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _timed_pss_bytes(pid: int) -> tuple[int, float]:
    """Return the PSS of a process, and the processor time that this took."""
    started_s = time.thread_time()
    return pss_bytes(pid), time.thread_time() - started_s

"""Measures the memory of all processes of this node: of functions, of the bases, and of the gateway.

Memory is PSS (proportional set size): each page divided by the number of processes that map it. So the sum counts a
shared page once. The share of each process changes when another one starts or ends, but among many processes little. So
a measurement reads the processes of the functions that have changed or have workers. It reads the others again when the
number of all processes has changed by more than DRIFT since.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..telemetry.background import BackgroundTasks
from .live import Live
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
# Shared pages are divided by the number of processes, so the error of a PSS that is not measured again is as large.
DRIFT = 0.1
# How long a caller of `latest` waits for a new measurement before they get the last one.
WAIT_S = 2.0


@dataclass(slots=True)
class FunctionMemory:
    """The memory of one function's processes, those of revisions that are not live included."""

    workers: int = 0
    workers_bytes: int = 0
    rest_bytes: int = 0
    """Memory of zygotes and standbys."""
    among: int = 0
    """The number of processes that all functions had when it was measured."""

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


NO_MEMORY = FunctionMemory()
"""The memory of a function without processes."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of all processes. A function that was not measured again has the same object as before."""

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
        # The pids and roles of the processes of each revision, and how many these are together.
        self._processes: dict[Live, list[tuple[int, str]]] = {}
        self._count = 0
        # By function: the memory of its processes at their last measurement.
        self._held: dict[str, FunctionMemory] = {}
        # The functions whose processes have come or gone since the last measurement of them.
        self._changed = set[str]()
        functions.events.processes.append(self._note_change)

    def _note_change(self, function: str) -> None:
        self._changes += 1
        self._changed.add(function)

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
        self._took_s = 0.0
        # A process that comes while these are measured is in the next measurement.
        due = self._list_due()
        gateway_bytes = await self._sum_bytes((os.getpid(), *self._functions.weights.pids))
        bases_bytes = await self._sum_bytes(self._functions.launcher.base_pids())
        while due:
            if may_stop and self._changes != changes:
                changes = self._changes
                if any(live.workers.replicas.starting for live in self._functions.running):
                    break
            name, processes = due.popitem()
            memory = FunctionMemory(among=self._count)
            for pid, role in processes:
                memory.add(role, await self._sum_bytes([pid]))
            self._held[name] = memory
        if due:
            # The measured memory of the other functions stays valid.
            self._changed.update(due)
        else:
            self._measured_s, self._measured_changes = time.monotonic(), began_changes
            self._last = NodeMemory(gateway_bytes, bases_bytes, dict(self._held), time.time())
        self._ended_s = time.monotonic()
        return self._last if self._measured_s >= started_s else None

    def _list_due(self) -> dict[str, list[tuple[int, str]]]:
        """Return the processes of the functions that are to be measured, by function."""
        changed, self._changed = self._changed, set()
        running = self._functions.running
        for live in self._processes.keys() - set(running):
            changed.add(live.record.function)
            del self._processes[live]
        for live in running:
            if live not in self._processes or live.record.function in changed:
                self._processes[live] = [(pid, role) for pid, role, _ in live.process_rows]
        found = dict[str, list[tuple[int, str]]]()
        for live, processes in self._processes.items():
            if processes:
                found.setdefault(live.record.function, []).extend(processes)
        self._held = {name: held for name, held in self._held.items() if name in found}
        self._count = sum(map(len, found.values()))
        return {name: processes for name, processes in found.items() if name in changed or self._is_due(name)}

    def _is_due(self, name: str) -> bool:
        held = self._held.get(name)
        return held is None or held.workers > 0 or abs(self._count - held.among) > DRIFT * held.among

    async def _sum_bytes(self, pids: Iterable[int]) -> int:
        held_bytes = 0
        for pid in pids:
            found_bytes, took_s = await asyncio.to_thread(_timed_pss_bytes, pid)
            held_bytes += found_bytes
            self._took_s += took_s
        return held_bytes


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

"""Measures the memory of all processes of this node: of functions, of the bases, and of the gateway.

Memory is PSS (proportional set size), which divides the size of a page by the number of processes that map it. So the
sum of all processes counts a shared page once. When a process starts or ends, the PSS of all others changes, but only a
little if there are many processes. So a measurement reads only the processes of functions that have changed or have
workers. It reads any other function again after the number of all processes has changed by more than DRIFT.
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

from ...ground.telemetry.background import BackgroundTasks
from ..functions.registry import Functions

GATEWAY, BASES = "(gateway)", "(bases)"
"""The names under which memory is shown that belongs to no single function. No function can have such a name."""
# After a measurement, the accounts pause for PAUSE times its processor time. So measurements take at most 2 % of a
# core. `latest` pauses for ASKED_PAUSE times the processor time, which is 10 % of a core, and for at least FRESH_S. It
# measures earlier if a process has started or ended.
PAUSE, ASKED_PAUSE = 50.0, 10.0
FRESH_S = 1.0
# To read the memory map of a process with torch takes about 10 ms, and a fork of this process waits meanwhile. So a
# measurement stops when a worker starts, unless the last complete measurement is older than OLDEST_S.
OLDEST_S = 60.0
# PSS divides shared pages by the number of processes. If this number changes by a share, a PSS that is not measured
# again is wrong by about the same share.
DRIFT = 0.1
# A caller of `latest` waits for a new measurement for at most this time, and then gets the last measurement.
WAIT_S = 2.0


@dataclass(slots=True)
class FunctionMemory:
    """The memory of one function's processes, including processes of revisions that are not live."""

    workers: int = 0
    workers_bytes: int = 0
    rest_bytes: int = 0
    """Memory of zygotes and standbys."""
    among: int = 0
    """The number of processes of all functions at the time of the measurement."""

    @property
    def total_bytes(self) -> int:
        return self.workers_bytes + self.rest_bytes

    def add(self, role: str, held_bytes: int) -> None:
        """Add the memory of a process."""
        if role == "worker":
            self.workers += 1
            self.workers_bytes += held_bytes
        else:
            self.rest_bytes += held_bytes


NO_MEMORY = FunctionMemory()
"""The memory of a function without processes."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of all processes. A function that was not measured again keeps its previous object."""

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
        # `_measured_s` is the end of the last complete measurement. `_ended_s` and `_took_s` are the end and the
        # processor time of the last measurement, which may have stopped early.
        self._measured_s, self._ended_s, self._took_s = -math.inf, -math.inf, 0.0
        # `_changes` counts the starts and ends of processes so far. `_measured_changes` is the value that `_changes`
        # had when the last complete measurement began.
        self._changes = self._measured_changes = 0
        self._running: asyncio.Task[NodeMemory | None] | None = None
        # `_processes` has the (pid, role) of each revision's processes, by the names of the function and the revision: the
        # meter keeps no ended revision in memory. `_count` is the number of all these processes.
        self._processes: dict[tuple[str, str], list[tuple[int, str]]] = {}
        self._count = 0
        # The memory of each function at its last measurement.
        self._held: dict[str, FunctionMemory] = {}
        # The functions whose processes have started or ended since the function was last measured.
        self._changed = set[str]()
        functions.events.processes.append(self._note_change)

    def _note_change(self, function: str) -> None:
        self._changes += 1
        self._changed.add(function)

    @property
    def is_current(self) -> bool:
        """True if no process has started or ended since the last complete measurement began."""
        return self._measured_changes == self._changes

    @property
    def pause_s(self) -> float:
        """The seconds until `metering.py` may start its next measurement because of a change.

        This pause begins at the end of the last measurement, and lasts PAUSE times the processor time of that
        measurement.
        """
        return max(0.0, self._ended_s + PAUSE * self._took_s - time.monotonic())

    async def latest(self) -> NodeMemory | None:
        """Return a new measurement, or the last measurement if it is recent or workers are starting.

        Return None if there is no complete measurement yet.
        """
        changes, fresh_until_s = self._changes, self._measured_s + max(FRESH_S, ASKED_PAUSE * self._took_s)
        if changes == self._measured_changes and time.monotonic() < fresh_until_s:
            return self._last
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                # A measurement that was already running may have begun before the last change. Then measure again.
                while await self.measure() is not None and self._measured_changes < changes:
                    pass
        return self._last

    async def measure(self) -> NodeMemory | None:
        """Measure all processes. Return None if a starting worker stops it. Concurrent callers share a measurement."""
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
        # This measurement does not include processes that start later. The next measurement does.
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
        """Return the functions to measure, each with its processes."""
        changed, self._changed = self._changed, set()
        running = {(live.record.function, live.record.revision): live for live in self._functions.running}
        for ended in self._processes.keys() - running.keys():
            changed.add(ended[0])
            del self._processes[ended]
        for (name, revision), live in running.items():
            if (name, revision) not in self._processes or name in changed:
                self._processes[name, revision] = [(pid, role) for pid, role, _ in live.process_rows]
        found = dict[str, list[tuple[int, str]]]()
        for (name, _), processes in self._processes.items():
            if processes:
                found.setdefault(name, []).extend(processes)
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
    """Return the PSS of a process, or 0 if the process has ended or its memory may not be read."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _timed_pss_bytes(pid: int) -> tuple[int, float]:
    """Return the PSS of a process, and the processor time that it took to read it."""
    started_s = time.thread_time()
    return pss_bytes(pid), time.thread_time() - started_s

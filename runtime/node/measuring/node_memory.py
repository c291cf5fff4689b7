"""Measures the memory of all processes of this node: of functions, of the bases, and of the gateway.

Nothing else measures them regularly: accounts (metering.py), the limit of idle memory (idle_memory_limit.py), the
console and `list` read these figures.

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
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...ground.telemetry.background import BackgroundTasks
from ..functions.live import Live
from ..functions.revisions import Revisions

GATEWAY, BASES = "(gateway)", "(bases)"
"""The names under which memory is shown that belongs to no single function. No function can have such a name."""
# A measurement begins SETTLE_S after a process has started or ended: by that time, a standby has been forked for the worker
# that has started. It begins after FIRST_S if no worker of the function was measured yet, because usage has no price until then.
# While there are workers, it is repeated every EVERY_S.
FIRST_S, SETTLE_S = 1.0, 10.0
EVERY_S = 60.0
# The pause after a measurement is PAUSE times the processor time that the measurement took. So measurements take at
# most 2 % of a core. `latest` returns the last measurement for ASKED_PAUSE times that processor time (10 % of a core),
# and for at least FRESH_S, unless a process has started or ended.
PAUSE, ASKED_PAUSE = 50.0, 10.0
FRESH_S = 1.0
# To read the memory map of a process with torch takes about 10 ms, and a fork of this process waits meanwhile. So a
# measurement stops when a worker starts, unless the last complete measurement is older than OLDEST_S.
OLDEST_S = 60.0
# PSS divides shared pages by the number of processes. If this number changes by 10 %, a PSS that is not measured again
# is wrong by about 10 %, too.
DRIFT = 0.1
# A caller of `latest` waits for a new measurement for at most this time, and then gets the last measurement.
WAIT_S = 2.0


class ProcessMemory(NamedTuple):
    """The memory of one process in bytes; 0 if the process has ended or its memory may not be read."""

    held_bytes: int = 0
    """Its PSS."""
    own_bytes: int = 0
    """The part of it that no other process shares (USS)."""


NO_PROCESS = ProcessMemory()


@dataclass(slots=True)
class FunctionMemory:
    """The memory of one function's processes, including processes of revisions that are not live."""

    workers: int = 0
    workers_bytes: int = 0
    rest_bytes: int = 0
    """Memory of zygotes and standbys."""
    idle: ProcessMemory = NO_PROCESS
    """Memory of one of its idle workers; 0 if it has none."""
    among: int = 0
    """The number of processes of all functions at the time of the measurement."""

    @property
    def total_bytes(self) -> int:
        return self.workers_bytes + self.rest_bytes

    def add(self, role: str, memory: ProcessMemory) -> None:
        """Add the memory of a process."""
        if role in ("worker", "idle"):
            self.workers += 1
            self.workers_bytes += memory.held_bytes
            self.idle = memory if role == "idle" else self.idle
        else:
            self.rest_bytes += memory.held_bytes


NO_MEMORY = FunctionMemory()
"""The memory of a function without processes."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """The memory of all processes. A function that was not measured again keeps its previous FunctionMemory object."""

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


_Processes = list[tuple[int, str]]
"""The pid and the role of each process. If a function has idle workers, one of them has the role "idle"."""


class MemoryMeter:
    """Measures the node's memory in a thread, after processes have changed and while workers run."""

    def __init__(self, revisions: Revisions, tasks: BackgroundTasks) -> None:
        self._revisions, self._tasks = revisions, tasks
        self.followers: list[Callable[[NodeMemory], Awaitable[float]]] = []
        """Awaited with each complete measurement that `measure_in` has planned. Each of them returns the seconds until
        the next measurement; infinity for none.
        """
        self._timer: asyncio.TimerHandle | None = None
        self._due_s, self._closed, self._telling = math.inf, False, False
        self._last: NodeMemory | None = None
        # `_measured_s` is the end of the last complete measurement. `_ended_s` and `_took_s` are the end and the
        # processor time of the last measurement, which may have stopped early.
        self._measured_s, self._ended_s, self._took_s = -math.inf, -math.inf, 0.0
        # `_changes` counts the starts and ends of processes so far. `_measured_changes` is the value that `_changes`
        # had when the last complete measurement began.
        self._changes = self._measured_changes = 0
        self._running: asyncio.Task[NodeMemory | None] | None = None
        # True to make the thread that measures stop before the next function.
        self._stopped = False
        # `_processes` has the processes of each revision, by the names of the function and the revision: the meter keeps no
        # ended revision in memory. `_count` is the number of all these processes.
        self._processes: dict[tuple[str, str], _Processes] = {}
        self._count = 0
        # The memory of each function at its last measurement.
        self._held: dict[str, FunctionMemory] = {}
        # `_changed` has the functions whose processes have started or ended since the last measurement of the function.
        # `_known` has the functions whose workers were measured before.
        self._changed, self._known = set[str](), set[str]()
        events = revisions.functions.events
        for notice in (events.processes, events.activated, events.live, events.pruned, events.removed):
            notice.append(self.note_change)

    def note_change(self, function: str = "", *_: str) -> None:
        """Measure soon, because a process of a function has started or ended, or the function was deployed or pruned.
        Ignore other arguments.
        """
        self._changes += 1
        if self._running is not None and self._measured_s > time.monotonic() - OLDEST_S:
            self._stopped = self._stopped or self._are_starting()
        self._changed.add(function)
        self.measure_in(SETTLE_S if function in self._known else FIRST_S)

    def measure_in(self, delay_s: float) -> None:
        """Measure after `delay_s`, but not before the pause is over, and tell the followers. If an earlier measurement
        is planned, keep its time.
        """
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        due_s = max(now_s + delay_s, self._ended_s + PAUSE * self._took_s)
        if due_s >= self._due_s or self._closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = due_s, loop.call_later(due_s - now_s, self._start)

    def close(self) -> None:
        """Plan no more measurements. Later reports about processes have no effect."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        self._due_s, self._timer = math.inf, None
        if self._telling:
            self.measure_in(SETTLE_S)
        else:
            self._tasks.create_task(self._measure_and_tell(), name="memory")

    async def _measure_and_tell(self) -> None:
        self._telling, again_s = True, math.inf
        try:
            if (found := await self.measure()) is not None:
                for follower in self.followers:
                    again_s = min(again_s, await follower(found))
        finally:
            self._telling = False
        if not self.is_current and not self._are_starting():
            # Measure again, because the processes have changed since the measurement began. While workers start, do
            # not: the end of a start calls `note_change`.
            again_s = min(again_s, SETTLE_S if self._changed <= self._known else FIRST_S)
        if any(live.workers.replicas.total for live in self._revisions.running):
            again_s = min(again_s, EVERY_S)
        if again_s < math.inf:
            self.measure_in(again_s)

    @property
    def is_current(self) -> bool:
        """True if no process has started or ended since the last complete measurement began."""
        return self._measured_changes == self._changes

    def _are_starting(self) -> bool:
        return any(live.workers.replicas.starting for live in self._revisions.running)

    # -- one measurement

    async def latest(self) -> NodeMemory | None:
        """Return a new measurement, or the last measurement if it is recent or workers are starting.

        Return None if there is no complete measurement yet.
        """
        changes, fresh_until_s = self._changes, self._measured_s + max(FRESH_S, ASKED_PAUSE * self._took_s)
        if self.is_current and time.monotonic() < fresh_until_s:
            return self._last
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                # Measure again if the measurement was already running, and began before the last change.
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
        began_changes = self._changes
        # This measurement does not include processes that start later. The next measurement does.
        due = self._list_due()
        due[GATEWAY] = [(pid, "") for pid in (os.getpid(), *self._revisions.weights.pids)]
        due[BASES] = [(pid, "") for pid in self._revisions.launcher.base_pids()]
        self._stopped = self._measured_s > time.monotonic() - OLDEST_S and self._are_starting()
        found, self._took_s = await asyncio.to_thread(self._read, due)
        gateway, bases = (found.pop(name, NO_MEMORY) for name in (GATEWAY, BASES))
        self._held |= found
        self._known |= {name for name, held in found.items() if held.workers}
        self._ended_s = time.monotonic()
        if due:
            # The measurement was stopped. Measure the functions in `due` next time. The new memory of the other
            # functions stays valid.
            self._changed.update(due.keys() - {GATEWAY, BASES})
            return None
        self._measured_s, self._measured_changes = self._ended_s, began_changes
        self._last = NodeMemory(gateway.rest_bytes, bases.rest_bytes, dict(self._held), time.time())
        return self._last

    def _read(self, due: dict[str, _Processes]) -> tuple[dict[str, FunctionMemory], float]:
        """Take functions from `due` and measure them until a worker starts. Also return the processor time. Blocks."""
        found, began_s = dict[str, FunctionMemory](), time.thread_time()
        while due and not self._stopped:
            name, processes = due.popitem()
            found[name] = FunctionMemory(among=self._count)
            for pid, role in processes:
                found[name].add(role, memory_of(pid))
        return found, time.thread_time() - began_s

    def _list_due(self) -> dict[str, _Processes]:
        """Return the functions to measure, each with its processes."""
        changed, self._changed = self._changed, set()
        running = {(live.record.function, live.record.revision): live for live in self._revisions.running}
        for ended in self._processes.keys() - running.keys():
            changed.add(ended[0])
            del self._processes[ended]
        for key, live in running.items():
            # List the processes of a function with workers each time, because no event reports which worker is idle.
            if key not in self._processes or key[0] in changed or live.workers.replicas.total:
                self._processes[key] = list(_processes_of(live))
        found = dict[str, _Processes]()
        for (name, _), processes in self._processes.items():
            if processes:
                found.setdefault(name, []).extend(processes)
        self._held = {name: held for name, held in self._held.items() if name in found}
        self._known &= found.keys()
        self._count = sum(map(len, found.values()))
        return {name: processes for name, processes in found.items() if name in changed or self._is_due(name)}

    def _is_due(self, name: str) -> bool:
        held = self._held.get(name)
        return held is None or held.workers > 0 or abs(self._count - held.among) > DRIFT * held.among


def _processes_of(live: Live) -> Iterable[tuple[int, str]]:
    idle = [replica.child.pid for replica in live.workers.replicas.idle[:1]]
    return ((pid, "idle" if pid in idle else role) for pid, role, _ in live.workers.inventory.processes())


def memory_of(pid: int) -> ProcessMemory:
    """Return the memory of a process."""
    held_bytes = own_bytes = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_bytes().splitlines():
            if line.startswith(b"Pss:"):
                held_bytes = int(line.split()[1]) * 1024
            elif line.startswith(b"Private_"):
                own_bytes += int(line.split()[1]) * 1024
    return ProcessMemory(held_bytes, own_bytes)

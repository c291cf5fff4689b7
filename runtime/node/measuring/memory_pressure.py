"""Subscribes to the kernel's reports of memory pressure, and computes how much memory to free.

The kernel reports pressure (PSI) of the gateway's cgroup, or else of the machine. Version 1 of cgroups has no PSI.
Instead, the kernel reports when a group's usage passes a share of its limit, and when it looks for pages to reclaim. If
the kernel reports nothing, memory is only checked after a change, such as the start of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ....machine import CGROUPS, PROC, limits, physical_memory

# Memory is short if more than SHORT_SHARE of a limit cannot be reclaimed. Then memory is freed until only EASY_SHARE
# cannot be reclaimed.
SHORT_SHARE, EASY_SHARE = 0.8, 0.7
# PSI trigger: a task waited for memory, for 200 ms within a window of 2 s. Windows of 2 s need no privilege.
TRIGGER = b"some 200000 2000000\0"
# Reports are ignored for this long after one report, because the kernel repeats them.
EVENT_PAUSE_S = 0.05
# Version 1 reports when a group's usage passes one of these shares. The usage includes reclaimable memory, so one share
# is not enough.
REPORTED_SHARES = tuple(share / 100 for share in range(70, 100, 3))
# In version 1, the limit of a cgroup without a limit is a number as large as the address space.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A cgroup that has a limit, which the gateway and all its processes share."""

    folder: Path
    limit_bytes: int
    unified: bool
    """True for version 2 of cgroups."""

    def used_bytes(self) -> int:
        """Return the bytes that the kernel cannot reclaim: the memory of processes and of files in memory. Raise
        OSError.
        """
        wanted = {"anon", "shmem"} if self.unified else {"total_rss", "total_shmem"}
        pairs = (line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        return sum(int(value) for key, value in pairs if key in wanted)


def find_limit(cgroups: Path = CGROUPS, proc: Path = PROC) -> MemoryLimit | None:
    """Return the smallest limit of the cgroups of this process; None if none of them has a limit."""
    found = (
        MemoryLimit(one.folder, one.numbers[0], one.unified)
        for one in limits("memory", cgroups, proc / "self" / "cgroup")
        if one.numbers[0] < _NO_LIMIT
    )
    return min(found, key=lambda one: one.limit_bytes, default=None)


class MemoryPressure:
    """Calls `on_pressure` when memory may be short. `short_bytes` tells whether it is short."""

    def __init__(self, on_pressure: Callable[[], None], cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        self._on_pressure, self._proc = on_pressure, proc
        self.limit = find_limit(cgroups, proc)
        self._loop = asyncio.get_running_loop()
        self._resources = contextlib.ExitStack()
        self._heard: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        # OSError: this kernel, or the machine's owner, does not allow the subscription.
        with contextlib.suppress(OSError):
            self._heard = self._subscribe(cgroups)
            self._listen()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._heard is not None:
            self._loop.remove_reader(self._heard)
        self._resources.close()

    def short_bytes(self) -> float:
        """Return how many bytes should be freed, 0 if none. Reads files of the kernel."""
        short = 0.0
        with contextlib.suppress(OSError, KeyError, ValueError):
            total, available = physical_memory(self._proc)
            short = _short(total - available, total)
        if self.limit is not None:
            with contextlib.suppress(OSError, ValueError):
                short = max(short, _short(self.limit.used_bytes(), self.limit.limit_bytes))
        return short

    def _subscribe(self, cgroups: Path) -> int:
        """Return a descriptor that becomes readable when the kernel reports. Raise OSError."""
        if self.limit is not None and not self.limit.unified:
            return self._subscribe_group(self.limit)
        own = self.limit.folder / "memory.pressure" if self.limit is not None else cgroups / "none"
        file = os.open(own if own.exists() else self._proc / "pressure" / "memory", os.O_RDWR | os.O_NONBLOCK)
        self._resources.callback(os.close, file)
        os.write(file, TRIGGER)
        # The event loop does not wait for priority events. The epoll descriptor becomes readable at a priority event.
        waiting = select.epoll()
        self._resources.callback(waiting.close)
        waiting.register(file, select.EPOLLPRI)
        return waiting.fileno()

    def _subscribe_group(self, limit: MemoryLimit) -> int:
        event = os.eventfd(0, os.EFD_NONBLOCK)
        self._resources.callback(os.close, event)
        usages = [("memory.usage_in_bytes", str(int(limit.limit_bytes * share))) for share in REPORTED_SHARES]
        for name, what in (*usages, ("memory.pressure_level", "low")):
            file = os.open(limit.folder / name, os.O_RDONLY)
            self._resources.callback(os.close, file)
            (limit.folder / "cgroup.event_control").write_text(f"{event} {file} {what}")
        return event

    def _listen(self) -> None:
        self._timer = None
        if self._heard is not None:
            self._loop.add_reader(self._heard, self._on_report)

    def _on_report(self) -> None:
        if self._heard is None:
            return
        self._loop.remove_reader(self._heard)
        # Only an eventfd can be read. The read of an epoll descriptor fails with EINVAL or EBADF, which is ignored.
        with contextlib.suppress(OSError):
            os.read(self._heard, 8)
        self._timer = self._loop.call_later(EVENT_PAUSE_S, self._listen)
        self._on_pressure()


def _short(used: int, limit: int) -> float:
    return used - EASY_SHARE * limit if used > SHORT_SHARE * limit else 0.0

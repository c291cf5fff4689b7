"""The CPU time of a gateway, and of the zygote and the workers of one of its functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import process_tree

WAIT_S = 60.0
# Processes that use no CPU time in this interval have nothing left to do.
LOOK_S = 0.02
# A gateway has nothing left to do if it uses at most this share of a core in a second.
IDLE_SHARE = 0.01


class Used(NamedTuple):
    """CPU time in seconds, by process."""

    gateway: float
    """All threads."""
    zygote: float
    children: float
    """The standby and the workers, also those that have ended."""

    def since(self, before: Used) -> Used:
        """Return the difference."""
        return Used(*(now - then for now, then in zip(self, before, strict=True)))

    def each(self, count: int) -> Used:
        """Return the time of each of `count` calls."""
        return Used(*(seconds / count for seconds in self))


class FunctionCpu:
    """Reads the CPU time of a gateway and of one function, which must keep its zygote."""

    def __init__(self, gateway: int, function: str) -> None:
        """`gateway` is a process id."""
        self._gateway, self._function = gateway, function
        role = self._title("zygote")
        zygotes = [one for one in process_tree.tree(gateway) if title(one.pid).startswith(role)]
        if len(zygotes) != 1:
            raise RuntimeError(f"{function} has {len(zygotes)} zygotes")
        self._zygote = zygotes[0]

    def used(self) -> Used:
        """Return the time of the gateway, and of the function's zygote, standby and workers so far."""
        return Used(clock_s(self._gateway), clock_s(self._zygote.pid), self._children_s())

    def wait_at_zero(self) -> None:
        """Wait until the function has a standby and no worker, and its processes use no CPU time.

        Send the gateway no request, because an answer would use CPU time.
        """
        deadline, last_s = time.monotonic() + WAIT_S, -1.0
        while time.monotonic() < deadline:
            titles = [title(child) for child in self._children()]
            used_s = clock_s(self._zygote.pid) + self._children_s()
            if len(titles) == 1 and titles[0].startswith(self._title("standby")) and used_s == last_s:
                return
            last_s = used_s
            time.sleep(LOOK_S)
        raise RuntimeError(f"{self._function} did not come to zero within {WAIT_S:.0f} s")

    def wait_idle(self) -> None:
        """Wait until the gateway has done the work that follows deploys, such as measuring the memory of all processes."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            before_s = clock_s(self._gateway)
            time.sleep(1.0)
            if clock_s(self._gateway) - before_s <= IDLE_SHARE:
                return
        raise RuntimeError(f"the gateway was not idle within {WAIT_S:.0f} s")

    def _children_s(self) -> float:
        times = self._zygote.cpu_times()
        # The kernel adds up the ended children in nanoseconds, and rounds the sum to 10 ms.
        used_s = times.children_user + times.children_system
        for child in self._children():
            with contextlib.suppress(ProcessLookupError):
                used_s += clock_s(child)
        return used_s

    def _children(self) -> Iterator[int]:
        # Read the kernel's list of children, because psutil would read the parent of each process of the
        # machine.
        pid = self._zygote.pid
        return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def _title(self, role: str) -> str:
        return f"pilotflame: {role} {self._function} "


def clock_s(pid: int) -> float:
    """Return the CPU time of a process, all its threads included, to the nanosecond, without its children."""
    # As clock_getcpuclockid(3): the inverted process id, and 2 for CPUCLOCK_SCHED.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(pid) from error


def title(pid: int) -> str:
    """Return the command line of a process, or what setproctitle(3) made of it; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""

"""The CPU time of a gateway, and of the zygote and the workers of one of its functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import process_tree

WAIT_S = 60.0
# Processes that use no CPU time in this interval have nothing left to do.
LOOK_S = 0.02
# A gateway has nothing left to do if it uses at most this share of a core in a second.
IDLE_SHARE = 0.01


class FunctionCpu:
    """Reads the CPU time of a gateway and of one function, which must keep its zygote."""

    def __init__(self, gateway: int, function: str, *, threads: bool = False) -> None:
        """`gateway` is a process id. With `threads`, the time of its other threads counts, too."""
        self._gateway, self._function = gateway, function
        self._gateway_s = clock_s if threads else main_thread_s
        role = self._title("zygote")
        zygotes = [one for one in process_tree.tree(gateway) if title(one.pid).startswith(role)]
        if len(zygotes) != 1:
            raise RuntimeError(f"{function} has {len(zygotes)} zygotes")
        self._zygote = zygotes[0]

    def used_s(self) -> float:
        """Return the time of the gateway's main thread and of the function's zygote, standby and workers so far.

        The main thread runs the event loop. Other threads measure memory and write files in the background.
        """
        return self._gateway_s(self._gateway) + self._function_s()

    def wait_at_zero(self) -> None:
        """Wait until the function has a standby and no worker, and its processes use no CPU time.

        It sends the gateway no request, because an answer would use CPU time.
        """
        deadline, last_s = time.monotonic() + WAIT_S, -1.0
        while time.monotonic() < deadline:
            titles = [title(child) for child in self._children()]
            used_s = self._function_s()
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

    def _function_s(self) -> float:
        times = self._zygote.cpu_times()
        # The kernel adds up the ended children in nanoseconds, and rounds the sum to 10 ms.
        function_s = clock_s(self._zygote.pid) + times.children_user + times.children_system
        for child in self._children():
            with contextlib.suppress(ProcessLookupError):
                function_s += clock_s(child)
        return function_s

    def _children(self) -> Iterator[int]:
        # psutil would read the parent of each process of the machine.
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


def main_thread_s(pid: int) -> float:
    """Return the CPU time of the main thread of a process, to the nanosecond."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def title(pid: int) -> str:
    """Return the command line of a process, or what setproctitle(3) made of it; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""

"""The CPU time of a gateway, and of the zygote and the workers of one of its functions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import process_tree

WAIT_S = 60.0
# As long as the function's processes use no CPU time, they have nothing left to do.
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Used:
    """CPU time (user and system) in seconds."""

    gateway_s: float
    function_s: float
    """Of the function's zygote, its standby, and its workers, the ended ones included."""

    @property
    def total_s(self) -> float:
        return self.gateway_s + self.function_s

    def each(self, calls: int) -> Used:
        """Return the share of one of so many calls."""
        return Used(self.gateway_s / calls, self.function_s / calls)

    def __add__(self, other: Used) -> Used:
        return Used(self.gateway_s + other.gateway_s, self.function_s + other.function_s)

    def __sub__(self, other: Used) -> Used:
        return Used(self.gateway_s - other.gateway_s, self.function_s - other.function_s)


class FunctionCpu:
    """Reads the CPU time of a gateway and of one function. The function must keep its zygote."""

    def __init__(self, gateway: int, function: str) -> None:
        """`gateway` is a process id."""
        self._gateway, self._function = gateway, function
        zygotes = [
            one for one in process_tree.tree(gateway) if _title(one.pid).startswith(self._name("zygote"))
        ]
        if len(zygotes) != 1:
            raise RuntimeError(f"{function} has {len(zygotes)} zygotes")
        self._zygote = zygotes[0]

    def used(self) -> Used:
        """Return what was used so far."""
        times = self._zygote.cpu_times()
        # Ended children count with ticks of 10 ms, but the kernel rounds their sum only.
        function_s = clock_s(self._zygote.pid) + times.children_user + times.children_system
        for child in self._children():
            with contextlib.suppress(ProcessLookupError):
                function_s += clock_s(child)
        return Used(clock_s(self._gateway), function_s)

    def wait_at_zero(self) -> None:
        """Wait until the function has a standby and no worker, and its processes use no CPU time.

        The gateway is not asked, because an answer would cost it CPU time.
        """
        deadline, last_s = time.monotonic() + WAIT_S, -1.0
        while time.monotonic() < deadline:
            titles = [_title(child) for child in self._children()]
            used_s = self.used().function_s
            if len(titles) == 1 and titles[0].startswith(self._name("standby")) and used_s == last_s:
                return
            last_s = used_s
            time.sleep(LOOK_S)
        raise RuntimeError(f"{self._function} did not come to zero within {WAIT_S:.0f} s")

    def _children(self) -> Iterator[int]:
        # psutil would read the parent of each process of the machine.
        pid = self._zygote.pid
        return map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())

    def _name(self, role: str) -> str:
        return f"pilotflame: {role} {self._function} "


def clock_s(pid: int) -> float:
    """Return the CPU time of a process and all its threads, to the nanosecond; not that of its children."""
    # As clock_getcpuclockid(3) does. The kernel takes the inverted process id, and 2 for the time that was scheduled.
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError as error:
        raise ProcessLookupError(pid) from error


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return ""

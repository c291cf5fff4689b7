"""A launched process as the gateway sees it: its link, its output, and why it ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
from abc import ABC, abstractmethod
from typing import NamedTuple

from ...ground.telemetry.log_stream import LogStream
from .connection import Link
from .worker_spec import STACKS_SIGNAL

LOG = logging.getLogger(__name__)
EXIT_REPORT_TIMEOUT_S = 2.0
UNKNOWN_CAUSE = "an unknown cause"
# How long a stuck worker has to write its stacks before it is killed.
STACKS_TIMEOUT_S = 0.5
# How long the gateway waits for the end of a killed process.
KILLED_S = 10.0


class EndCause(NamedTuple):
    """How a process ended."""

    text: str = ""
    """The cause in messages: "signal 9 (SIGKILL)" or "exit code 1". For a kill, the text also names the sender and the
    reason, if they are known.
    """
    out_of_memory: bool = False
    """True if the kernel certainly killed the process because the memory of its function ran out."""


class Child(ABC):
    """A launched process that has connected to the gateway. `gone` is set once the process has ended."""

    def __init__(self, link: Link, pid: int, name: str, output: LogStream | None = None) -> None:
        """`output` reads the lines that the process prints; None if the process has connected no output."""
        self.link, self.pid, self.name, self.output = link, pid, name, output
        self.gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._exit_code: asyncio.Future[int | None] = self._loop.create_future()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._kill_at_s = math.inf
        self._kill_reason = ""
        self._memory_text = ""
        self._out_of_memory = False

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""

    def dump_stacks(self) -> None:
        """Let the process write the stacks of its threads to its log, even if the threads are stuck."""
        self.send_signal(STACKS_SIGNAL)

    def kill_stuck(self, reason: str) -> None:
        """Let the worker write its stacks, and kill it a moment later. The cause of its end then contains `reason`."""
        if self._kill_reason or self.gone.is_set():
            return
        self._kill_reason = reason
        if self.output is not None:
            # Let unmarked lines belong to no invocation, because the lines of the stacks are no output of an invocation.
            self.output.crowd()
        self.dump_stacks()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_timer = self._loop.call_later(STACKS_TIMEOUT_S, self.kill)

    def kill_after(self, timeout_s: float) -> None:
        """Kill the process if it has not ended in `timeout_s`. If this is called several times, the earliest deadline counts."""
        kill_at_s = self._loop.time() + timeout_s
        # If there is a reason, `kill_stuck` has already set its own, short timer.
        if self._kill_reason or self.gone.is_set() or kill_at_s >= self._kill_at_s:
            return
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._kill_at_s = kill_at_s
        reason = f"it had not ended {timeout_s:.0f} s after it was told to"
        # A process that had no time to end is not stuck, so its stacks are not of interest.
        kill = functools.partial(self.kill_stuck, reason) if timeout_s > 0 else self.kill
        self._kill_timer = self._loop.call_later(timeout_s, kill)

    async def wait_gone(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` until the process has ended, because the kernel may be unable to end it."""
        if self.gone.is_set():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.gone.wait()

    async def wait_killed(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of a process that is killed in that time. Log an error if the process
        remains.
        """
        await self.wait_gone(timeout_s)
        if not self.gone.is_set():
            fault = (
                "%s (pid %d) was killed, and remains. The kernel cannot end a process that waits in a driver."
            )
            LOG.error(fault, self.name, self.pid)

    async def cause(self) -> EndCause:
        """Return how the process ended. Wait at most EXIT_REPORT_TIMEOUT_S for the report of its end."""
        if not self._exit_code.done():
            await asyncio.wait([self._exit_code], timeout=EXIT_REPORT_TIMEOUT_S)
        code = self._exit_code.result() if self._exit_code.done() else None
        if code is None:
            return EndCause(UNKNOWN_CAUSE)
        if code >= 0:
            return EndCause(f"exit code {code}")
        # Python has no names for real-time signals.
        names = {number.value: number.name for number in signal.Signals}
        text = f"signal {-code} ({names.get(-code, 'real-time')})"
        if self._kill_reason:
            return EndCause(f"{text}, sent by the gateway because {self._kill_reason}")
        return EndCause(f"{text}{self._memory_text}", self._out_of_memory)

    def report_exit(self, code: int | None, *, out_of_memory: bool = False, certain: bool = True) -> None:
        """Set the exit code that the parent process reported, or None if the parent ended first.

        `out_of_memory` is True if the kernel killed the process because memory ran out. If that is not `certain`, the
        kernel may have killed another process of the machine instead.
        """
        self._out_of_memory = out_of_memory and certain
        if out_of_memory:
            self._memory_text = f", sent by the kernel {'' if certain else 'perhaps '}because memory ran out"
        if not self._exit_code.done():
            self._exit_code.set_result(code)

    def ended(self) -> None:
        """Record that the process has ended: set `gone`, stop the timers, and let the link end."""
        # A running timer would keep this object in memory until the timer fires.
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self.gone.set()
        self.link.note_peer_ended()

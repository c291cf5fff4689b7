"""The launcher interface: launch a revision, fork its workers, kill them, and learn how they ended."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from ..link.connection import Link
from ..link.worker_spec import WorkerSpec
from ..telemetry.logs import LogBook

EXIT_REPORT_TIMEOUT_S = 2.0


class Child(ABC):
    """A launched process that has dialled in. `gone` is set once it has ended."""

    def __init__(self, link: Link, pid: int, name: str) -> None:
        self.link = link
        self.pid = pid
        self.name = name
        self.gone = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._exit_code: asyncio.Future[int | None] = self._loop.create_future()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._kill_at_s = 0.0

    @abstractmethod
    def kill(self) -> None:
        """Kill the process."""

    def kill_after(self, timeout_s: float) -> None:
        """Kill the process unless it ends in time. Of several calls the earliest deadline counts."""
        kill_at_s = self._loop.time() + timeout_s
        if self._kill_timer is not None:
            if self._kill_at_s <= kill_at_s:
                return
            self._kill_timer.cancel()
        if not self.gone.is_set():
            self._kill_at_s = kill_at_s
            self._kill_timer = self._loop.call_later(timeout_s, self.kill)

    async def cause(self) -> str:
        """Return how the process ended, for people: "signal 9 (SIGKILL)", "exit code 1"."""
        try:
            async with asyncio.timeout(EXIT_REPORT_TIMEOUT_S):
                code = await asyncio.shield(self._exit_code)
        except TimeoutError:
            code = None
        if code is None:
            return "an unknown cause"
        if code >= 0:
            return f"exit code {code}"
        # Python has no names for real-time signals.
        names = {number.value: number.name for number in signal.Signals}
        return f"signal {-code} ({names.get(-code, 'real-time')})"

    def report_exit(self, code: int | None) -> None:
        """Set the exit code that the parent reports, or None if there is no parent left to report it."""
        if not self._exit_code.done():
            self._exit_code.set_result(code)

    def ended(self) -> None:
        """The process has ended."""
        if self._kill_timer is not None:
            # A timer that is left running would keep this object in memory.
            self._kill_timer.cancel()
        self.gone.set()


class WorkerSource(Protocol):
    """Forks the workers of one revision."""

    facts: dict[str, Any]
    """`Handler.facts` of the handler."""
    spawn_reason: str
    """Why workers are spawned instead of forked; empty if they are forked."""

    @property
    def alive(self) -> bool: ...

    @property
    def zygote_pid(self) -> int | None:
        """The process that workers are forked from; None if they are spawned."""

    async def fork(self, name: str, logs: LogBook) -> Child:
        """Return a standby: connected, without weights. Raise LauncherError."""

    def close(self) -> None:
        """End the zygote. Its workers drain."""

    async def wait_closed(self, timeout_s: float) -> None:
        """Wait for the end of the closed zygote, and kill it after `timeout_s`."""


class Launcher(Protocol):
    """Launches revisions."""

    async def launch(self, spec: WorkerSpec, logs: LogBook, on_death: Callable[[], None]) -> WorkerSource:
        """Import and build the handler of `spec`. Raise HandlerError or LauncherError.

        `on_death` is called if the zygote dies before it is closed.
        """

    async def close(self) -> None:
        """End everything that was launched, and wait for it. Later launches raise LauncherError."""

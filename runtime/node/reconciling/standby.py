"""Keeps the standby of one revision: a child of the zygote, without weights, that becomes the next worker.

A standby may rehearse before it has weights. If the revision needs GPUs, the standby rehearses only with a booking of
GPU memory.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator

from ....errors import LauncherError
from ...calls.link.child import Child
from ...calls.link.frames import Frame, FrameKind
from ...ground.telemetry.logs import Log
from ..launching.launcher import WorkerSource
from .gpu_bookings import GpuBooking, GpuBookings, GpuClaimant

# Forking a standby takes processor time from the requests that follow a cold start. (MiniLM on 2 cores: a request
# took up to 69 ms instead of 23 ms.) So the next standby waits until no invocation runs, at most for this time.
LATEST_STANDBY_S = 2.0


class Standby:
    """The standby of one revision, and the GPU memory that the standby may use."""

    def __init__(
        self, gpus: GpuBookings, claimant: GpuClaimant, names: Iterator[str], logs: Log, tasks: asyncio.TaskGroup,
        on_change: Callable[[], None], *, wanted: bool,
    ) -> None:  # fmt: skip
        """`names` yields the name of each child. If not `wanted`, the revision has no standby.

        `on_change` is called when the standby is primed or has ended.
        """
        self.child: Child | None = None
        """The standby; None while there is none."""
        self.primed = False
        self.due_s = math.inf
        """When to fork a missing standby although invocations run."""
        self._gpus, self._claimant, self._names, self._logs = gpus, claimant, names, logs
        self._tasks, self._on_change, self._wanted = tasks, on_change, wanted
        # The zygote, from which standbys are forked; None without a zygote.
        self._source: WorkerSource | None = None
        # The booking of the standby's GPU memory; None without a booking.
        self._booking: GpuBooking | None = None
        self._forking = False
        # True after a failed fork. Then the next fork waits until a worker has started, or a zygote was launched.
        self._failed = False

    def note_zygote(self, source: WorkerSource | None) -> None:
        """Fork standbys from the zygote `source` from now on; None after the end of the zygote."""
        self._source = source
        if source is not None:
            self._failed, self.due_s = False, time.monotonic() + LATEST_STANDBY_S

    def note_works(self) -> None:
        """Allow another fork after a failed one: a worker has started, so the zygote works."""
        self._failed = False

    @property
    def lacks(self) -> bool:
        """True if a wanted standby is missing, is not being forked, and the zygote can fork it."""
        there = self.child is not None or self._forking or self._failed
        return self._wanted and not there and self._source is not None and self._source.alive

    # -- forking

    def replenish(self) -> None:
        """Fork a standby, if one is missing."""
        if self.lacks and (source := self._source) is not None:
            self._forking = True
            self._tasks.create_task(self._fork(source))

    async def _fork(self, source: WorkerSource) -> None:
        rehearsals, child = self._gpus.rehearsals, None
        # The zygote knows whether the handler rehearses.
        booking = rehearsals.take(self._claimant) if source.facts.get("rehearses") else None
        try:
            child = await source.fork(
                next(self._names), self._logs, rehearsals.limit_mb(self._claimant, booking)
            )
        except LauncherError as error:
            if source is self._source:
                self._failed = True
                self._logs.write("gateway", f"no standby: {error}", "warning")
            return
        finally:
            self._forking = False
            self._gpus.bind(booking, child, self._tasks)
        if not self._wanted or self.child is not None or source is not self._source:
            child.link.close()
            return
        self.child, self.primed, self._booking = child, False, booking
        child.link.bind(self._on_frame, lambda: self._on_lost(child))
        # Waiting revisions may get workers now: the standby can become a worker, or end to make room.
        self._gpus.on_freed()

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.PRIMED:
            self.primed = True
            if self._booking is not None and self.child is not None:
                reserved = list(frame.json().get("reserved", ()))
                self._tasks.create_task(self._shrink(self._booking, self.child, reserved))
            self._on_change()

    async def _shrink(self, booking: GpuBooking, child: Child, reserved: list[int]) -> None:
        """Learn how much GPU memory the standby keeps after its rehearsal."""
        self._gpus.note_rehearsed(booking, await self._gpus.hardware.kept(booking.full, child, reserved))

    def _on_lost(self, child: Child) -> None:
        if self.child is child:
            self.child = None
            self._on_change()

    # -- its end

    def take(self) -> Child | None:
        """Hand the standby over to the caller; return None if there is no live standby."""
        child, self.child = self.child, None
        self.due_s = time.monotonic() + LATEST_STANDBY_S
        return child if child is not None and not child.link.closed else None

    def drop(self) -> None:
        """Close the standby's link, which ends its process."""
        if (child := self.take()) is not None:
            child.link.close()

    def end(self) -> bool:
        """End the standby. Return False if there is no standby."""
        if self.child is None:
            return False
        self.drop()
        self._on_change()
        return True

    def stop(self) -> None:
        """End the standby, and fork no other: few or no workers will start."""
        self._wanted = False
        self.end()

    def close(self) -> None:
        """End the standby, and fork no other, because the revision has ended."""
        self._wanted = False
        self.drop()

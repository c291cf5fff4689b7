"""Books GPU memory of the node for workers and standbys, within the memory of each GPU.

A worker has its booking from before its activation until its process has ended. While the worker is parked, its booking
covers only the memory that its process still uses. A standby that rehearses has a booking too, and keeps the booking when
it becomes a worker. The allocation (scaling/allocation.py) decides which processes make room.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...calls.link.child import Child
from ...calls.serving.replica import Replica, ReplicaState
from ...ground.settings.resources import CONTEXT_MB
from ...ground.telemetry.metrics import Reading
from ..launching.gpu_driver import GpuDriver
from ..scaling.claims import NodeProcess, ProcessState
from ..scaling.gpu_ledger import Booking, GpuLedger
from ..scaling.placement import Gpu, GpuNeed, MemoryByGpu, candidates
from .gpu_hardware import GpuHardware


class GpuClaimant(Protocol):
    """A revision whose workers may need GPUs, as `GpuBookings` sees it."""

    @property
    def gpu_need(self) -> GpuNeed | None:
        """The GPUs that each worker of the revision needs; None if it needs no GPU."""

    def renew_standby(self) -> bool:
        """Replace a standby that could not rehearse, because there is room now. Return False if there is no standby."""


@dataclass(eq=False)
class GpuBooking(Booking):
    """The GPU memory of one worker, or of a standby that rehearses."""

    owner: GpuClaimant
    child: Child | None = None
    """The process that has the booking; None while the process is being forked."""
    standby: bool = False
    replica: Replica | None = None
    """The worker that has the booking; None until the process is activated."""
    given: bool = False
    """True if the worker parks, or has parked, to make room for another worker."""
    parked: MemoryByGpu = field(init=False)
    """The memory of the parked worker: as measured after it last parked, or else an allowance for its context."""

    def __post_init__(self) -> None:
        self.parked = dict.fromkeys(self.full, CONTEXT_MB)

    @property
    def inheritable(self) -> bool:
        """True if a standby has the booking and can become a worker."""
        return self.standby and self.child is not None and not self.child.link.closed


class Rehearsals:
    """The bookings of standbys that rehearse, and the revisions whose standby had no room to rehearse."""

    def __init__(self, ledger: GpuLedger[GpuBooking]) -> None:
        self._ledger = ledger
        self._without_room: dict[GpuClaimant, None] = {}
        self.waiting = 0
        """The number of revisions that wait for room. While a revision waits, no standby takes a booking."""

    def take(self, one: GpuClaimant) -> GpuBooking | None:
        """Book memory for a standby that is about to be forked. Return None if it needs no GPU, or must not rehearse."""
        if (need := one.gpu_need) is None:
            return None
        room = self._ledger.rehearsal_room(need)
        if room is None or self.waiting:
            self._without_room[one] = None
            return None
        taken = GpuBooking(*room, one, standby=True)
        self._ledger.add(taken)
        return taken

    def limit_mb(self, one: GpuClaimant, held: GpuBooking | None) -> int | None:
        """Return how many MiB of each GPU a process may use before it is activated; None if there is no limit.

        Without a booking, the result is 0. It is also 0 if the node has more GPUs than a worker needs, because the process
        does not know its GPUs before its activation.
        """
        if one.gpu_need is None:
            return None
        known = len(candidates(self._ledger.gpus, one.gpu_need)) == one.gpu_need.gpus
        return min(held.holding.values()) if known and held is not None else 0

    def renew(self) -> None:
        """If there is room now, replace one standby that could not rehearse. After the new standby's rehearsal, this
        method is called again, and replaces the next standby.
        """
        for one in self._without_room:
            if one.gpu_need is None or self.waiting:
                continue
            if self._ledger.rehearsal_room(one.gpu_need) is not None and one.renew_standby():
                del self._without_room[one]
                return

    def leave(self, one: GpuClaimant) -> None:
        """Forget that a revision's standby could not rehearse, because the revision ends."""
        self._without_room.pop(one, None)


class GpuBookings:
    """The bookings of each GPU's memory. On a node without GPUs, no function that needs a GPU can be deployed."""

    def __init__(self, gpus: Sequence[Gpu], driver: GpuDriver) -> None:
        self.hardware = GpuHardware(gpus, driver)
        self.gpus = self.hardware.gpus
        self._ledger: GpuLedger[GpuBooking] = GpuLedger(self.gpus)
        self.rehearsals = Rehearsals(self._ledger)
        self.on_freed: Callable[[], None] = lambda: None
        """Called when less memory is booked than before, and when a standby can become a worker."""

    # -- the bookings

    def plan(self, one: GpuClaimant, parked: Sequence[Replica], missing: int) -> list[MemoryByGpu] | None:
        """Plan `missing` more workers of a revision: first parked workers wake, then others start.

        Return the memory of the workers that start; an empty list if the revision needs no GPU, and None if there is no
        room for all.
        """
        if one.gpu_need is None:
            return []
        # The standby becomes the first worker that starts, so its own booking counts as free.
        own = self.standby_of(one) if missing > len(parked) else None
        waking = [self.of(replica) for replica in parked[::-1][:missing]]
        return self._ledger.plan(one.gpu_need, missing - len(parked), waking, own)

    def take(self, one: GpuClaimant, at: MemoryByGpu, standby: Child | None = None) -> GpuBooking:
        """Make a booking for a worker that is about to start, with the planned memory, and return the booking.

        If the worker was a standby with a booking, that booking becomes the worker's booking.
        """
        if (own := self._of_standby(standby)) is not None:
            self._ledger.promote(own, at)
            own.standby = False
            own.parked = dict.fromkeys(at, CONTEXT_MB)
            return own
        taken = GpuBooking(at, at, one)
        self._ledger.add(taken)
        return taken

    def note_rehearsed(self, held: GpuBooking, kept: MemoryByGpu) -> None:
        """Book the memory that a standby holds after its rehearsal."""
        if held.standby:
            self._ledger.note_held(held, kept)
            self.on_freed()

    def share(self, replica: Replica) -> float | None:
        """Return the number of GPUs that a worker holds, as the sum of its shares of memory; None without a booking."""
        if (held := self.of(replica)) is None:
            return None
        sizes = {gpu.id: gpu.memory_mb for gpu in self.gpus}
        return sum(memory_mb / sizes[gpu] for gpu, memory_mb in held.holding.items())

    def note_parked(self, replica: Replica, freed_bytes: int, kept: MemoryByGpu) -> None:
        """Learn that a worker has parked, and how much memory it keeps.

        A worker without a snapshot could not bring its weights back. Such a worker frees nothing, and keeps its booking.
        """
        held = self.of(replica)
        if held is None or replica.state is not ReplicaState.PARKED:
            return
        held.parked = kept if freed_bytes else held.full
        self._ledger.note_held(held, held.parked)
        self.on_freed()

    def resume(self, replica: Replica) -> bool:
        """Raise the booking of a parked worker to its full memory, because the worker is to wake. Return False if there
        is no room.
        """
        if (held := self.of(replica)) is None:
            return True
        if not self._ledger.wake(held):
            return False
        held.given = False
        return True

    def of(self, replica: Replica) -> GpuBooking | None:
        """Return the booking of a worker; None without a booking."""
        return next((each for each in self._ledger.bookings if each.replica is replica), None)

    def standby_of(self, one: GpuClaimant) -> GpuBooking | None:
        """Return the booking of the standby that would become the next worker; None if there is no such booking."""
        return next((each for each in self._ledger.bookings if each.owner is one and each.inheritable), None)

    def _of_standby(self, child: Child | None) -> GpuBooking | None:
        found = (each for each in self._ledger.bookings if each.standby and each.child is child)
        return next(found, None) if child is not None else None

    def of_owner(self, one: GpuClaimant) -> list[GpuBooking]:
        """Return the bookings of a revision, including the bookings of processes that end."""
        return [each for each in self._ledger.bookings if each.owner is one]

    @property
    def owners(self) -> list[GpuClaimant]:
        """The revisions that hold memory of GPUs. A revision is included until its last process has ended."""
        return list(dict.fromkeys(each.owner for each in self._ledger.bookings))

    def bind(self, held: GpuBooking | None, child: Child | None, tasks: asyncio.TaskGroup) -> None:
        """Bind a booking to a process until it has ended. Without a process, because a fork failed, free the booking now."""
        if child is None:
            self.free(held)
        elif held is not None:
            held.child = child
            tasks.create_task(self._free_at_end(held, child))

    async def _free_at_end(self, held: GpuBooking, child: Child) -> None:
        """Give a booking back only after its process has ended, because the process uses GPU memory until then."""
        await child.gone.wait()
        # If a standby has died, its booking may belong to a worker now.
        if held.child is child:
            self.free(held)

    def free(self, held: GpuBooking | None) -> None:
        """Give a booking back: the worker has ended, or could not start."""
        if held is not None:
            self._ledger.remove(held)
            self.on_freed()

    async def readings(self) -> list[Reading]:
        """Return the number of revisions that wait for GPU memory, and the figures of each GPU, for the metrics."""
        if not self.gpus:
            return []
        waits = "Functions, and deploys, that wait for room on GPUs."
        waiting = Reading("gpu_waiting", waits, {(): float(self.rehearsals.waiting)}, ())
        return [waiting, *await self.hardware.readings(self._ledger.booked)]


# A worker that restores its weights counts as a ready worker that was never used. So the allocation can end it to make
# room, and ends it before the other ready workers.
_STATES = {
    ReplicaState.RESTORING: ProcessState.READY,
    ReplicaState.READY: ProcessState.READY,
    ReplicaState.PARKED: ProcessState.PARKED,
    ReplicaState.DRAINING: ProcessState.DRAINING,
    ReplicaState.DEAD: ProcessState.DRAINING,
}


def node_processes(
    replicas: Iterable[Replica], forking: Iterable[GpuBooking | None], bookings: Iterable[GpuBooking]
) -> Iterator[NodeProcess]:
    """Yield the processes of a revision as the allocation sees them.

    `forking` are the bookings of workers that are being forked, and `bookings` are all bookings of the revision.
    """
    left = dict.fromkeys(bookings)
    of = {booking.replica: booking for booking in left if booking.replica is not None}
    for replica in replicas:
        used_s = replica.idle_since_s if replica.activation.ready_s else -math.inf
        booking = of.get(replica)
        calls = 0 if replica.relieved else len(replica.outstanding.calls)
        yield _process(replica, _STATES[replica.state], booking, calls, used_s)
        if booking is not None:
            del left[booking]
    for number, booking in enumerate(forking):
        yield _process(booking or ("forking", number), ProcessState.STARTING, booking)
        if booking is not None:
            # The booking may be missing in `left`: if the process died while the weights were being fetched, it was freed.
            left.pop(booking, None)
    for booking in left:
        yield _process(
            booking, ProcessState.STANDBY if booking.inheritable else ProcessState.LEAVING, booking
        )


def _process(
    key: Hashable, state: ProcessState, booking: GpuBooking | None, calls: int = 0, used_s: float = 0.0
) -> NodeProcess:
    if booking is None:
        return NodeProcess(key, state, calls, used_s)
    # A worker that starts, or that freed nothing when it parked, has to end to make room.
    parks = booking.parked if used_s > 0 and booking.parked != booking.full else None
    return NodeProcess(key, state, calls, used_s, booking.holding, booking.full, parks)

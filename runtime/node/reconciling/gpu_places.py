"""Books the places of workers and standbys on the node's GPUs, within the memory of each.

A worker has its place from before its activation until its process has ended. A parked worker keeps only the memory
that its process still holds. A standby that rehearses has a place too, and keeps the place when it becomes a worker.
The allocation (scaling/allocation.py) decides which processes make room.
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
    """A revision whose workers may need GPUs, as `GpuPlaces` sees it."""

    @property
    def gpu_need(self) -> GpuNeed | None:
        """The GPUs that each of its workers needs; None without GPUs."""

    def renew_standby(self) -> bool:
        """Replace the standby, which could not rehearse: there is room now. Return False if there is no standby."""


@dataclass(eq=False)
class GpuPlace(Booking):
    """The GPU memory of one worker, or of a standby that rehearses."""

    owner: GpuClaimant
    child: Child | None = None
    """The process that has the place; None while the process is being forked."""
    standby: bool = False
    replica: Replica | None = None
    """The worker that has the place; None until the process is activated."""
    given: bool = False
    """True if the worker parks, or has parked, to make room for another worker."""
    parked: MemoryByGpu = field(init=False)
    """The holding of the parked worker: as measured after it last parked, or else an allowance for its context."""

    def __post_init__(self) -> None:
        self.parked = dict.fromkeys(self.full, CONTEXT_MB)

    @property
    def inheritable(self) -> bool:
        """True if a standby has the place and can become a worker."""
        return self.standby and self.child is not None and not self.child.link.closed


class Rehearsals:
    """The places of standbys that rehearse, and the revisions whose standby had no room to rehearse."""

    def __init__(self, ledger: GpuLedger[GpuPlace]) -> None:
        self._ledger = ledger
        self._without_room: dict[GpuClaimant, None] = {}
        self.waiting = 0
        """The number of revisions that wait for room. While a revision waits, no standby takes a place."""

    def take(self, one: GpuClaimant) -> GpuPlace | None:
        """Book a place for a standby that is about to be forked, and return the place; None if it must not rehearse."""
        if (need := one.gpu_need) is None:
            return None
        room = self._ledger.rehearsal_room(need)
        if room is None or self.waiting:
            self._without_room[one] = None
            return None
        taken = GpuPlace(*room, one, standby=True)
        self._ledger.add(taken)
        return taken

    def limit_mb(self, one: GpuClaimant, held: GpuPlace | None) -> int | None:
        """Return how many MiB of each GPU a process may use before it is activated; None if there is no limit.

        If the node has more GPUs than a worker needs, the process does not know its GPUs yet, and the result is 0.
        """
        if one.gpu_need is None:
            return None
        known = len(candidates(self._ledger.gpus, one.gpu_need)) == one.gpu_need.gpus
        return min(held.holding.values()) if known and held is not None else 0

    def renew(self) -> None:
        """If there is room now, replace one standby that could not rehearse. The next follows after that rehearsal."""
        for one in self._without_room:
            if one.gpu_need is None or self.waiting:
                continue
            if self._ledger.rehearsal_room(one.gpu_need) is not None and one.renew_standby():
                del self._without_room[one]
                return

    def leave(self, one: GpuClaimant) -> None:
        """Forget that a revision's standby could not rehearse, because the revision ends."""
        self._without_room.pop(one, None)


class GpuPlaces:
    """The bookings of each GPU's memory. On a node without GPUs, no function that needs a GPU can be deployed."""

    def __init__(self, gpus: Sequence[Gpu], driver: GpuDriver) -> None:
        self.hardware = GpuHardware(gpus, driver)
        self.gpus = self.hardware.gpus
        self._ledger: GpuLedger[GpuPlace] = GpuLedger(self.gpus)
        self.rehearsals = Rehearsals(self._ledger)
        self.on_freed: Callable[[], None] = lambda: None
        """Called when less memory is booked than before, and when a standby can become a worker."""

    # -- the places

    def plan(self, one: GpuClaimant, parked: Sequence[Replica], missing: int) -> list[MemoryByGpu] | None:
        """Plan `missing` more workers of a revision: first parked workers wake, then others start.

        Return the holdings of the workers that start; an empty list if the revision needs no GPU, and None if there is no
        room for all.
        """
        if one.gpu_need is None:
            return []
        # The standby becomes the first worker that starts, so its own place counts as free.
        own = self.standby_of(one) if missing > len(parked) else None
        waking = [self.of(replica) for replica in parked[::-1][:missing]]
        return self._ledger.plan(one.gpu_need, missing - len(parked), waking, own)

    def take(self, one: GpuClaimant, at: MemoryByGpu, standby: Child | None = None) -> GpuPlace:
        """Book a place for a worker that is about to start, at a planned holding, and return the place.

        If the worker was a standby with a place, that place becomes the worker's place.
        """
        if (own := self._of_standby(standby)) is not None:
            self._ledger.promote(own, at)
            own.standby = False
            own.parked = dict.fromkeys(at, CONTEXT_MB)
            return own
        taken = GpuPlace(at, at, one)
        self._ledger.add(taken)
        return taken

    def note_rehearsed(self, held: GpuPlace, kept: MemoryByGpu) -> None:
        """Book the memory that a standby holds after its rehearsal."""
        if held.standby:
            self._ledger.note_held(held, kept)
            self.on_freed()

    def share(self, replica: Replica) -> float | None:
        """Return the number of GPUs that a worker holds, as the sum of its shares of memory; None without a place."""
        if (held := self.of(replica)) is None:
            return None
        sizes = {gpu.id: gpu.memory_mb for gpu in self.gpus}
        return sum(memory_mb / sizes[gpu] for gpu, memory_mb in held.holding.items())

    def note_parked(self, replica: Replica, freed_bytes: int, kept: MemoryByGpu) -> None:
        """Learn that a worker has parked, and how much memory it keeps.

        A worker without a snapshot, from which weights could be brought back, frees nothing and keeps all its memory.
        """
        held = self.of(replica)
        if held is None or replica.state is not ReplicaState.PARKED:
            return
        held.parked = kept if freed_bytes else held.full
        self._ledger.note_held(held, held.parked)
        self.on_freed()

    def resume(self, replica: Replica) -> bool:
        """Book the full memory of a worker again for a parked worker. Return False if there is no room for it."""
        if (held := self.of(replica)) is None:
            return True
        if not self._ledger.wake(held):
            return False
        held.given = False
        return True

    def of(self, replica: Replica) -> GpuPlace | None:
        """Return the place of a worker; None without a place."""
        return next((each for each in self._ledger.bookings if each.replica is replica), None)

    def standby_of(self, one: GpuClaimant) -> GpuPlace | None:
        """Return the place of the standby that would become the next worker; None if there is no such place."""
        return next((each for each in self._ledger.bookings if each.owner is one and each.inheritable), None)

    def _of_standby(self, child: Child | None) -> GpuPlace | None:
        found = (each for each in self._ledger.bookings if each.standby and each.child is child)
        return next(found, None) if child is not None else None

    def of_owner(self, one: GpuClaimant) -> list[GpuPlace]:
        """Return the places of a revision, including the places of processes that end."""
        return [each for each in self._ledger.bookings if each.owner is one]

    @property
    def owners(self) -> list[GpuClaimant]:
        """The revisions that hold memory of GPUs. A revision is included until its last process has ended."""
        return list(dict.fromkeys(each.owner for each in self._ledger.bookings))

    def bind(self, held: GpuPlace | None, child: Child | None, tasks: asyncio.TaskGroup) -> None:
        """Give a place to a process until it has ended. Without a process, because a fork failed, free the place now."""
        if child is None:
            self.free(held)
        elif held is not None:
            held.child = child
            tasks.create_task(self._free_at_end(held, child))

    async def _free_at_end(self, held: GpuPlace, child: Child) -> None:
        """Give a place back after its process has ended: until then, the process holds GPU memory."""
        await child.gone.wait()
        # If a standby has died, its place may belong to a worker now.
        if held.child is child:
            self.free(held)

    def free(self, held: GpuPlace | None) -> None:
        """Give a place back: the worker has ended, or could not start."""
        if held is not None:
            self._ledger.remove(held)
            self.on_freed()

    async def readings(self) -> list[Reading]:
        """Return the held and the used memory of each GPU, for the metrics."""
        if not self.gpus:
            return []
        waits = "Functions, and deploys, that wait for room on GPUs."
        waiting = Reading("gpu_waiting", waits, {(): float(self.rehearsals.waiting)}, ())
        return [waiting, *await self.hardware.readings(self._ledger.booked)]


# A worker that restores its weights counts as ready: to make room, it can be ended, before any ready worker.
_STATES = {
    ReplicaState.RESTORING: ProcessState.READY,
    ReplicaState.READY: ProcessState.READY,
    ReplicaState.PARKED: ProcessState.PARKED,
    ReplicaState.DRAINING: ProcessState.DRAINING,
    ReplicaState.DEAD: ProcessState.DRAINING,
}


def node_processes(
    replicas: Iterable[Replica], forking: Iterable[GpuPlace | None], places: Iterable[GpuPlace]
) -> Iterator[NodeProcess]:
    """Yield the processes of a revision as the allocation sees them.

    `forking` are the places of workers that are being forked, and `places` are all places of the revision.
    """
    left = dict.fromkeys(places)
    of = {place.replica: place for place in left if place.replica is not None}
    for replica in replicas:
        used_s = replica.idle_since_s if replica.activation.ready_s else -math.inf
        place = of.get(replica)
        calls = 0 if replica.relieved else len(replica.outstanding.calls)
        yield _process(replica, _STATES[replica.state], place, calls, used_s)
        if place is not None:
            del left[place]
    for number, place in enumerate(forking):
        yield _process(place or ("forking", number), ProcessState.STARTING, place)
        if place is not None:
            # Its process may have died while the weights are being fetched. Then the place was given back.
            left.pop(place, None)
    for place in left:
        yield _process(place, ProcessState.STANDBY if place.inheritable else ProcessState.LEAVING, place)


def _process(
    key: Hashable, state: ProcessState, place: GpuPlace | None, calls: int = 0, used_s: float = 0.0
) -> NodeProcess:
    if place is None:
        return NodeProcess(key, state, calls, used_s)
    # A worker that starts, or that freed nothing when it parked, has to end to make room.
    parks = place.parked if used_s > 0 and place.parked != place.full else None
    return NodeProcess(key, state, calls, used_s, place.holding, place.full, parks)

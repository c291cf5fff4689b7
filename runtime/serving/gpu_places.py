"""Gives the workers of all functions their places on the node's GPUs, within the memory of each.

A worker has its place from before it is activated until its process has ended. A parked one keeps only what its process
still holds. A standby that rehearses has a place too, which its worker inherits. If callers wait for a worker that has no place,
idle workers of other functions make room: they are parked, or ended where that is not enough. Standbys end first. That room is
reserved for the functions that wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...errors import ActivationTimeout, SettingsError
from ..launching.gpu_driver import MIB, GpuDriver, GpuUse
from ..launching.gpus import names_within
from ..launching.launcher import Child
from ..launching.nvidia_gpus import NvidiaDriver
from ..scaling.gpu_ledger import Booking, GpuLedger
from ..scaling.node_limit import ReachedLimit
from ..scaling.placement import Gpu, GpuHolder, GpuNeed, Holding, candidates, make_room, need_of, place
from ..settings.resources import CONTEXT_MB, Resources
from ..telemetry.metrics import Reading
from .replica import Replica, ReplicaState
from .worker_limit import ASK_AGAIN_S, GIVE_AFTER_S

# Who has no worker, and has waited for so long, gets the room of one that has calls, once it has ended them.
PATIENCE_S = 10.0
# Standbys make room before all workers, whose callers lose at least 0.
STANDBY_COST = -1.0


class GpuClaimant(Protocol):
    """A revision whose workers need GPUs, as the places see it."""

    @property
    def function(self) -> str: ...

    @property
    def gpu_need(self) -> GpuNeed | None:
        """What each of its workers needs; None if that is nothing."""

    @property
    def gpu_parked(self) -> list[Replica]:
        """Its parked workers."""

    def gpu_spare(self, state: ReplicaState) -> int:
        """Return how many of its workers in a state the owner does not keep (`scale.min`)."""

    def gpu_cost(self, freed_bytes: float) -> float:
        """Return what its callers lose for each byte if a worker frees so many."""

    def end_standby(self) -> None:
        """End its standby in favour of another function."""

    def renew_standby(self) -> bool:
        """Replace its standby, which could not rehearse: there is room now. Return False if it is being forked."""

    def give_gpu(self, replica: Replica, *, park: bool) -> None:
        """Park an idle worker, or end one, in favour of another function. What it has begun, it finishes before."""

    def scale(self) -> None:
        """Ask again, if more workers are still wanted."""


@dataclass(eq=False)
class GpuPlace(Booking):
    """The GPU memory of one worker, or of a standby that rehearses."""

    owner: GpuClaimant
    child: Child | None = None
    """The process that has it; None while that is being forked."""
    standby: bool = False
    replica: Replica | None = None
    """None until it is activated."""
    left: Holding | None = None
    """What it will hold in a moment, when it has made room; None if it does not make any."""
    given: bool = False
    """True if it makes, or has made, room for another function."""
    parked: Holding = field(init=False)
    """Its holding if it parks: as when it parked last, or else an allowance for its context."""

    def __post_init__(self) -> None:
        self.parked = dict.fromkeys(self.full, CONTEXT_MB)

    @property
    def inheritable(self) -> bool:
        """True if it is of a standby that can become a worker."""
        return self.standby and self.child is not None and not self.child.link.closed

    @property
    def ending(self) -> bool:
        """True if its process ends, and has no calls that may take long."""
        if self.standby:
            return self.child is not None and self.child.link.closed
        ends = (ReplicaState.DRAINING, ReplicaState.DEAD)
        return self.replica is not None and self.replica.state in ends and not self.replica.outstanding.calls


class GpuPlaces:
    """Who holds memory of which GPU, and who waits for some. Without GPUs, nobody who needs one can be deployed."""

    def __init__(self, gpus: Sequence[Gpu] = (), driver: GpuDriver | None = None) -> None:
        self.gpus, self._driver = tuple(gpus), driver or NvidiaDriver()
        self._ledger: GpuLedger[GpuPlace] = GpuLedger(self.gpus)
        # Those that want more workers than have a place, and since when. Who has waited longest is asked first.
        self._short: dict[GpuClaimant, float] = {}
        # The same for the first workers of revisions that are deployed. They come before all others.
        self._first: dict[GpuClaimant, tuple[float, asyncio.Future[GpuPlace]]] = {}
        # Where their next worker goes once others have made room.
        self._reserved: dict[GpuClaimant, Holding] = {}
        # The revisions whose standby had no room to rehearse.
        self._unrehearsed: dict[GpuClaimant, None] = {}
        self._offering = False
        self._timer: asyncio.TimerHandle | None = None

    def check(self, function: str, resources: Resources) -> None:
        """Raise SettingsError if no worker of a function could ever have a place here."""
        if (need := need_of(resources)) is None or place(self.gpus, (), need) is not None:
            return
        memory = f" with {need.memory_mb} MiB of each" if need.memory_mb is not None else ""
        there = ", ".join(f"{gpu.id} with {gpu.memory_mb} MiB" for gpu in self.gpus) or "none"
        sliced = need.gpus > 1 and any(gpu.slice for gpu in self.gpus)
        why = "; a process can use one MIG slice only" if sliced else ""
        raise SettingsError(
            f"{function!r} needs {need.gpus} GPU{'s' if need.gpus > 1 else ''}{memory} (resources.gpus); this node has: {there}{why}.",
            remedy="Lower resources.gpus or resources.gpu_memory_mb, leave them out to run without a GPU of its own, or"
            " see `pilotflame doctor` and the gateway's setting `gpus`.",
        )

    # -- asking

    def ask(self, one: GpuClaimant, workers: int, *, waiting: bool, lasting: bool = False) -> int:
        """Return how many of `workers` of a revision have a place now. If callers are `waiting`, others make room for the next.

        If `lasting`, only those do that have been idle for a while.
        """
        if (need := one.gpu_need) is None:
            return workers
        if one in self._first:
            return 0
        reserved = self._reserved.pop(one, None)
        if (may := self.room(one, workers)) == workers:
            if self._short.pop(one, None) is not None and self._unrehearsed:
                self._offer()
            if reserved is not None:
                self.offer()
            return may
        since_s = self._short.setdefault(one, time.monotonic())
        if waiting and not may:
            self._make_room(one, need, since_s, lasting=lasting)
        self._ask_again()
        return may

    def room(self, one: GpuClaimant, workers: int) -> int:
        """Return for how many of `workers` of a revision there is room now, without asking for it."""
        if one.gpu_need is None:
            return workers
        held, count = self._kept(one), 0
        while count < workers and (found := place(self.gpus, held, one.gpu_need)) is not None:
            held.append(found)
            count += 1
        return count

    async def first_place(self, one: GpuClaimant, timeout_s: float) -> GpuPlace | None:
        """Wait for the place of a new revision's first worker. None if it needs none. Raise ActivationTimeout.

        Workers of the revision that it replaces make room for it, those of `scale.min` and busy ones too.
        """
        if one.gpu_need is None:
            return None
        found: asyncio.Future[GpuPlace] = asyncio.get_running_loop().create_future()
        self._first[one] = time.monotonic(), found
        self._serve_first()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(found)
        except BaseException as error:
            if found.done():
                self.free(found.result())
            if not isinstance(error, TimeoutError):
                raise
            message = f"No GPU had room for a worker within {timeout_s:.0f} s."
            remedy = "Try again when other functions, and the old revision's callers, have less to do."
            raise ActivationTimeout(message, remedy=remedy) from None
        finally:
            del self._first[one]
            self._forget(one)

    def _serve_first(self) -> None:
        for one, (since_s, found) in self._first.items():
            if found.done() or one.gpu_need is None:
                continue
            self._reserved.pop(one, None)
            if (taken := self.take(one)) is not None:
                found.set_result(taken)
            else:
                self._make_room(one, one.gpu_need, since_s, lasting=False)
                self._ask_again()

    def reached(self, one: GpuClaimant) -> ReachedLimit | None:
        """Return why a revision has fewer workers than it wants; None if GPUs are not the reason."""
        return ReachedLimit("gpus", len(self.gpus)) if one in self._short else None

    def leave(self, one: GpuClaimant) -> None:
        """Forget what a revision waits for."""
        self._unrehearsed.pop(one, None)
        self._forget(one)

    def _forget(self, one: GpuClaimant) -> None:
        self._short.pop(one, None)
        if self._reserved.pop(one, None) is not None or self._unrehearsed:
            self._offer()

    def offer(self) -> None:
        """Let those who wait ask again: a worker has nothing to do."""
        if self._short or self._first:
            self._offer()

    def note_forked(self) -> None:
        """Learn that a standby was forked: it can become a worker now, or be replaced."""
        if self._unrehearsed:
            self._offer()
        self.offer()

    # -- the places

    def take(self, one: GpuClaimant, standby: Child | None = None) -> GpuPlace | None:
        """Return a place for a worker that is about to start; None if there is no room. A standby brings its own."""
        if (need := one.gpu_need) is None:
            return None
        own, beside = self._of_standby(standby), self._reserved_beside(one)
        if (found := self._ledger.room(need, beside, own)) is None:
            return None
        if own is not None:
            self._ledger.promote(own, found)
            own.standby, own.left = False, None
            return own
        taken = GpuPlace(found, found, one)
        self._ledger.add(taken)
        return taken

    def absorb(self, standby: Child | None) -> None:
        """Drop the place of a standby that becomes a worker with another place, on the same GPUs."""
        self.free(self._of_standby(standby))

    def take_standby(self, one: GpuClaimant) -> GpuPlace | None:
        """Return a place for a standby that is about to be forked; None if it must not rehearse."""
        if (need := one.gpu_need) is None:
            return None
        room = self._ledger.rehearsal_room(need, self._reserved_beside(one))
        if room is None or self._short or self._first:
            self._unrehearsed[one] = None
            return None
        taken = GpuPlace(*room, one, standby=True)
        self._ledger.add(taken)
        return taken

    def rehearsal_mb(self, one: GpuClaimant, held: GpuPlace | None) -> int | None:
        """Return how many MiB of each GPU a process may use before it is activated; None if there is no limit.

        It does not know its GPUs yet if the node has more than it needs.
        """
        if one.gpu_need is None:
            return None
        known = len(candidates(self.gpus, one.gpu_need)) == one.gpu_need.gpus
        return min(held.holding.values()) if known and held is not None else 0

    def note_rehearsed(self, held: GpuPlace, kept: Holding) -> None:
        """Learn what a standby holds after its rehearsal."""
        if held.standby:
            self._ledger.note_held(held, kept)
            self._offer()

    async def kept(self, held: GpuPlace, child: Child, reserved: Sequence[int]) -> Holding:
        """Return what a process holds that has given memory back: what the driver says, or else an estimate.

        The estimate is what torch's allocator keeps of its GPUs (`reserved`, in bytes, in their order), and an allowance for
        its context.
        """
        measured = await asyncio.to_thread(self._driver.held_by, child.pid)
        torchs = dict(zip(held.full, reserved, strict=False))
        return {
            gpu: -(-measured[gpu] // MIB) if gpu in measured else CONTEXT_MB - (-torchs.get(gpu, 0) // MIB)
            for gpu in held.full
        }

    def note_parking(self, replica: Replica) -> None:
        """Learn that a worker begins to give the memory of its GPUs back."""
        if (held := self.of(replica)) is not None:
            held.left = held.parked

    def share(self, replica: Replica) -> float | None:
        """Return how many GPUs a worker holds, as shares of their memory summed; None if it has no place."""
        if (held := self.of(replica)) is None:
            return None
        sizes = {gpu.id: gpu.memory_mb for gpu in self.gpus}
        return sum(memory_mb / sizes[gpu] for gpu, memory_mb in held.holding.items())

    def gives(self, replica: Replica) -> bool:
        """Return True if a worker parks in favour of another function."""
        held = self.of(replica)
        return held is not None and held.given

    def note_parked(self, replica: Replica, freed_bytes: int, kept: Holding) -> None:
        """Learn that it has, and how much it keeps. A worker without a snapshot gives nothing back, so it has to end for others."""
        held = self.of(replica)
        if held is None or held.left is None or replica.state is not ReplicaState.PARKED:
            return
        if freed_bytes:
            held.parked, held.left = kept, None
            self._ledger.note_held(held, kept)
        elif held.given:
            held.left = {}
            held.owner.give_gpu(replica, park=False)
        else:
            held.left = None
        self._offer()

    def resume(self, replica: Replica) -> bool:
        """Return True if a parked worker may have its memory back, which it then holds."""
        if (held := self.of(replica)) is None:
            return True
        self._reserved.pop(held.owner, None)
        if not self._ledger.wake(held, self._reserved_beside(held.owner)):
            return False
        held.left, held.given = None, False
        return True

    def assign(self, held: GpuPlace, replica: Replica) -> None:
        """Learn which worker has a place."""
        held.replica, held.child = replica, replica.child

    async def free_at_end(self, held: GpuPlace, child: Child) -> None:
        """Give a place back when the process that has it has ended: until then it holds memory of its GPUs."""
        await child.gone.wait()
        # A standby that died may have left it to a worker.
        if held.child is child:
            self.free(held)

    def environment(
        self, resources: Resources, held: GpuPlace | None = None, *, contained: bool = False
    ) -> dict[str, str]:
        """Return the environment variables with which a worker sees its GPUs only, and has its part of their memory.

        Without a place: the variables of its zygote, with all GPUs that a worker may get. `contained`: in a container, which
        numbers its GPUs from 0.
        """
        if resources.gpus is None:
            return {}
        need = need_of(resources)
        given = [gpu.id for gpu in candidates(self.gpus, need)] if need is not None else []
        seen = list(held.full) if held is not None else given
        if contained:
            seen = names_within(given, seen)
        return self._driver.environment(seen, resources.gpu_memory_mb)

    def free(self, held: GpuPlace | None) -> None:
        """Give a place back: the worker has ended, or could not start."""
        if held is not None:
            self._ledger.remove(held)
            self._offer()

    # -- metrics

    async def readings(self) -> list[Reading]:
        """Return what is held and used of each GPU, for the metrics."""
        if not self.gpus:
            return []
        held = self._ledger.booked
        uses = await asyncio.to_thread(self._driver.uses)
        waiting = float(len(self._short) + len(self._first))
        return [
            Reading("gpu_waiting", "Functions, and deploys, that wait for room on GPUs.", {(): waiting}, ()),
            _reading(
                "memory_bytes",
                "Memory of the node's GPUs.",
                {gpu.id: gpu.memory_mb << 20 for gpu in self.gpus},
            ),
            _reading(
                "held_bytes",
                "Memory of GPUs that is booked for workers, parked workers and standbys.",
                {gpu.id: held[gpu.id] << 20 for gpu in self.gpus},
            ),
            _reading(
                "used_bytes",
                "Memory of GPUs that all processes of the machine use.",
                {self._label(one): one.used_bytes for one in uses},
            ),
            _reading(
                "busy_ratio",
                "Share of the time in which a GPU ran something.",
                {self._label(one): one.busy_share for one in uses if one.busy_share is not None},
            ),
        ]

    def _label(self, use: GpuUse) -> str:
        """Return the id by which the settings name a GPU."""
        return next((gpu.id for gpu in self.gpus if use.is_named(gpu.id)), use.id)

    # -- making room

    def _make_room(self, one: GpuClaimant, need: GpuNeed, since_s: float, *, lasting: bool) -> None:
        """Have others make room for one worker of a revision, and reserve it: for a parked one, or else for a new one.

        They are parked, or ended if that is not enough. Who has no worker, and waits for long, gets one of a busy function.
        """
        patient = not lasting and time.monotonic() - since_s >= PATIENCE_S
        parked = [place for place in map(self.of, one.gpu_parked) if place is not None]
        places, own = list(self._ledger.bookings), None if one in self._first else self._standby_of(one)
        for ways in (_Ways(lasting, park=True), _Ways(lasting), _Ways(lasting, busy=True)):
            if ways.busy and not (patient or one in self._first):
                return
            held = self._holders(places, one, ways, patient=patient)
            # A new worker would be the standby, which needs no room then.
            without = [
                GpuHolder({}) if each is own else holder for each, holder in zip(places, held, strict=False)
            ]
            without += held[len(places) :]
            for only in (*map(_more, parked), None):
                if (
                    room := make_room(self.gpus, held if only is not None else without, need, only)
                ) is not None:
                    self._reserved[one] = room.holding
                    for giver in [places[number] for number in room.takes]:
                        self._take_from(giver, park=ways.park)
                    return

    def _take_from(self, giver: GpuPlace, *, park: bool) -> None:
        if giver.standby:
            giver.left = {}
            giver.owner.end_standby()
            return
        giver.left, giver.given = giver.parked if park else {}, True
        if giver.replica is not None:
            giver.owner.give_gpu(giver.replica, park=park)

    def _holders(
        self, givers: list[GpuPlace], one: GpuClaimant, ways: _Ways, *, patient: bool
    ) -> list[GpuHolder]:
        """Return these places, and then what is reserved, as `make_room` sees them."""
        held, offered = list[GpuHolder](), Counter[tuple[GpuClaimant, ReplicaState]]()
        for each in givers:
            if each.left is not None or each.ending:
                held.append(GpuHolder(each.holding, each.left or {}, leaving=True))
            elif each.standby:
                held.append(GpuHolder(each.holding, {}, STANDBY_COST if each.inheritable else None))
            else:
                held.append(self._holder(each, one, ways, offered, patient=patient))
        return held + [GpuHolder(holding) for holding in self._reserved_beside(one)]

    def _holder(
        self, each: GpuPlace, one: GpuClaimant, ways: _Ways, offered: Counter[tuple[GpuClaimant, ReplicaState]],
        *, patient: bool,
    ) -> GpuHolder:  # fmt: skip
        """Return the place of a worker as `make_room` sees it. `offered` counts those that each owner may lose."""
        left = each.parked if ways.park else {}
        replica, old = each.replica, one in self._first and each.owner.function == one.function
        if replica is None or each.owner is one or not ways.allow(replica, old=old, patient=patient):
            return GpuHolder(each.holding, left)
        offered[each.owner, replica.state] += 1
        if not old and offered[each.owner, replica.state] > each.owner.gpu_spare(replica.state):
            return GpuHolder(each.holding, left)
        freed_mb = sum(each.holding.values()) - sum(left.values())
        return GpuHolder(each.holding, left, 0.0 if old else each.owner.gpu_cost(float(freed_mb << 20)))

    def _kept(self, one: GpuClaimant) -> list[Holding]:
        """Return the holdings of processes, and the room that is reserved for other revisions than `one`.

        The standby of `one` becomes its worker, so it does not count.
        """
        return [*self._ledger.held(self._standby_of(one)), *self._reserved_beside(one)]

    def _reserved_beside(self, one: GpuClaimant) -> list[Holding]:
        return [holding for other, holding in self._reserved.items() if other is not one]

    def of(self, replica: Replica) -> GpuPlace | None:
        """Return the place of a worker; None if it has none."""
        return next((each for each in self._ledger.bookings if each.replica is replica), None)

    def _of_standby(self, child: Child | None) -> GpuPlace | None:
        found = (each for each in self._ledger.bookings if each.standby and each.child is child)
        return next(found, None) if child is not None else None

    def _standby_of(self, one: GpuClaimant) -> GpuPlace | None:
        """Return the place of a standby that would be the next worker."""
        return next((each for each in self._ledger.bookings if each.owner is one and each.inheritable), None)

    def _offer(self) -> None:
        if not self._offering:
            self._offering = True
            asyncio.get_running_loop().call_soon(self._ask_all)

    def _ask_all(self) -> None:
        self._offering = False
        self._serve_first()
        for one in list(self._short):
            one.scale()
        if not self._short and not self._first:
            self._renew_standby()

    def _renew_standby(self) -> None:
        """Have one standby that could not rehearse replaced, if there is room now. The next follows when it has rehearsed."""
        for one in self._unrehearsed:
            need, beside = one.gpu_need, self._reserved_beside(one)
            room = self._ledger.rehearsal_room(need, beside) if need is not None else None
            if room is not None and one.renew_standby():
                del self._unrehearsed[one]
                return

    def _ask_again(self) -> None:
        """Ask those who wait from time to time: no event tells that a worker is idle, or a caller waits, for long."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.offer()


@dataclass(frozen=True, slots=True)
class _Ways:
    """From which workers room may be taken, and how."""

    lasting: bool
    """Only from those that have been idle for a while."""
    park: bool = False
    """By parking them; otherwise they end."""
    busy: bool = False
    """Also from those that have calls, which they finish before."""

    def allow(self, replica: Replica, *, old: bool, patient: bool) -> bool:
        """Return True if a worker may have to go. `old`: it is of a revision that is to be replaced."""
        if replica.state is ReplicaState.PARKED:
            return not self.park
        if replica.state is not ReplicaState.READY:
            return False
        if replica.outstanding.calls:
            return self.busy and (old or patient)
        return not self.lasting or replica.idle_since_s + GIVE_AFTER_S <= time.monotonic()


def _reading(name: str, text: str, by_gpu: Mapping[str, float]) -> Reading:
    return Reading(f"gpu_{name}", text, {(gpu,): float(value) for gpu, value in by_gpu.items()}, ("gpu",))


def _more(parked: GpuPlace) -> Holding:
    """Return what a parked worker needs beside what it holds."""
    return {gpu: memory_mb - parked.holding.get(gpu, 0) for gpu, memory_mb in parked.full.items()}

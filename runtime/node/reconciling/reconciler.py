"""The one loop of a node that decides about workers: it compares each revision's row with its workers, and acts.

A look at one revision computes the revision's row and carries it out in the same call, so that the worker for a first
request starts without another turn of the event loop. A start waits only if it does not fit beside the processes of all
revisions. Then an allocation (scaling/allocation.py) weighs the claims of all revisions, at most once in a turn of the
event loop. One timer wakes the loop, at the earliest time that a row or an allocation names.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, Protocol, cast

from ...calls.serving.replicas import Replicas
from ...ground.settings.scale_spec import ReachedLimit
from ...ground.telemetry.metrics import Reading
from ..scaling.allocation import allocate
from ..scaling.claims import Allocation, Grant, Limits, RevisionClaim
from ..scaling.placement import MemoryByGpu
from ..scaling.seen import Seen
from ..scaling.table import AtRest, Row
from .gpu_bookings import GpuBookings, GpuClaimant

# A look carries out at most this many rows: after workers wake, stop or park, the revision gets a new row.
MOST_LOOKS = 3
# Allocations take at most this share of the event loop's time, however many events there are.
MOST_SHARE = 0.1
# The key of the next allocation in the agenda. Revisions have other keys.
ALLOCATION = ""
# uvloop rounds timers to a millisecond. This time is added to each delay, so that a timer is never early.
ROUNDING_S = 0.0005


class Observations(Protocol):
    """The observations of one revision, and its row (observed.py)."""

    row: Row
    """The row of the last look."""
    looked_s: float
    """When the row was made."""
    quiet_s: float
    """After this time without calls, the row may change, or an idle period begins."""

    @property
    def urgent(self) -> bool:
        """True if other revisions make room for this one: callers, a deploy or an urgent signal wait for a worker."""

    def advance(self, now_s: float) -> float:
        """Take the steps that are due. Return when the next step is due."""

    def update_row(self, now_s: float, arriving: int = 0) -> tuple[Row, Seen]:
        """Return its row, and the observations that the row follows from. `arriving` invocations are about to be queued."""

    def claim(self, waiting_since_s: float) -> RevisionClaim:
        """Return the claim for the next allocation: the workers and the GPU memory that the revision has and wants."""


class Steps(Protocol):
    """The steps of one revision (carry_out.py)."""

    def row(self, row: Row, seen: Seen, planned: Sequence[MemoryByGpu]) -> bool:
        """Start, wake, stop and park workers. Return True if workers woke, stop or park: then the revision has a new row.

        `planned` has the GPU memory of each worker that starts. It is empty for workers without GPUs.
        """

    def at_rest(self, rest: AtRest) -> None:
        """Launch or end the zygote and the standby, and release the weights, as `rest` says."""

    def grant(self, grant: Grant, row: Row, seen: Seen) -> None:
        """Start, wake, park and stop workers as the allocation says."""


class Member(GpuClaimant, Protocol):
    """One revision, as the reconciler sees it (revision_workers.py)."""

    key: str

    @property
    def owner(self) -> str:
        """The owner, whose limit of workers applies to this revision in addition to the limit of the gateway."""

    @property
    def replicas(self) -> Replicas: ...
    @property
    def observed(self) -> Observations: ...
    @property
    def carry_out(self) -> Steps: ...
    def __hash__(self) -> int: ...

    def look(self) -> None:
        """Call `Reconciler.look`."""

    def settle(self, now_s: float) -> None:
        """Called at the end of a look."""

    def note_limit(self, reached: ReachedLimit | None, missing: int) -> None:
        """Record that the limit `reached` keeps `missing` workers from starting. None means that no limit keeps workers
        from starting any more.
        """


class _Short(NamedTuple):
    """A revision that wants more workers than fit."""

    since_s: float
    """The beginning of the wait; infinity if neither callers nor a deploy wait."""
    missing: int
    """The number of workers that it lacks."""
    awake: int = 0
    """The number of its awake workers at its last look."""
    reached: ReachedLimit | None = None
    """The limit that, by the last allocation, keeps workers from starting; None before the first allocation."""


class Agenda:
    """The times at which the reconciler looks at each revision again, and allocates again. It has the only timer."""

    def __init__(self, on_due: Callable[[str], None]) -> None:
        """The agenda calls `on_due` with each key that is due. An allocation is due before the looks."""
        self._on_due, self._loop = on_due, asyncio.get_running_loop()
        self._due: dict[str, float] = {}
        # The heap has the entries of `_due`, and outdated entries. The times of outdated entries differ from `_due`.
        self._heap: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = math.inf

    def add(self, key: str, when_s: float) -> None:
        """Have `key` due at this time, unless it is due earlier.

        The earlier time stays, because an extra look costs less than moving the timer.
        """
        if when_s < self._due.get(key, math.inf):
            self._due[key] = when_s
            heapq.heappush(self._heap, (when_s, key))
            self._set_timer(when_s)

    def drop(self, key: str) -> None:
        self._due.pop(key, None)

    def _set_timer(self, when_s: float) -> None:
        if self._timer is not None:
            # Not `TimerHandle.when`: for a delay of zero, uvloop returns a handle without it.
            if self._timer_at_s <= when_s:
                return
            self._timer.cancel()
        self._timer_at_s = when_s
        delay_s = max(0.0, when_s - time.monotonic()) + ROUNDING_S
        self._timer = self._loop.call_at(self._loop.time() + delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, now_s, due = None, time.monotonic(), list[str]()
        while self._heap:
            due_s, key = self._heap[0]
            if self._due.get(key) == due_s:
                if due_s > now_s:
                    break
                due.append(key)
                del self._due[key]
            heapq.heappop(self._heap)
        for key in sorted(due, key=lambda key: key != ALLOCATION):
            self._on_due(key)
        if self._heap:
            self._set_timer(self._heap[0][0])


class SharedLimits:
    """The limits that all revisions of a node share, and the revisions that wait because of them."""

    def __init__(
        self, gpus: GpuBookings, agenda: Agenda, most: int | None, of_owner: Callable[[str], int | None], drain_s: float
    ) -> None:  # fmt: skip
        """`most` limits the workers of all functions together. `of_owner` returns the limit of one owner's functions.
        None means no limit.
        """
        self._gpus, self._agenda, self.drain_s = gpus, agenda, drain_s
        self._most, self.of_owner = most, of_owner
        self.lacks: Callable[[str, int], object] = lambda _function, _want: None
        """Called when a limit that several gateways may share keeps workers from a function. The arguments are the function's
        name and the number of workers that its calls need."""
        self.members: dict[str, Member] = {}
        """The revisions that may have workers, by key."""
        # Revisions that retire: their processes count until they have ended.
        self._leaving: dict[str, Member] = {}
        self._short: dict[Member, _Short] = {}
        # True if an event may have changed the result of an allocation.
        self._pending = False
        # True if present workers may exceed a limit.
        self._shrunk = False
        self._rested_at_s = 0.0
        gpus.on_freed = self.note_change

    def join(self, one: Member) -> None:
        self.members[one.key] = one

    def leave(self, one: Member) -> None:
        """Stop looking at a revision, because it retires. Its processes count until `forget`."""
        if self.members.pop(one.key, None) is not None:
            self._leaving[one.key] = one
        self._agenda.drop(one.key)
        self._note_short(one, None)

    def forget(self, one: Member) -> None:
        """Forget a revision whose processes have ended."""
        self.leave(one)
        self._leaving.pop(one.key, None)
        self._gpus.rehearsals.leave(one)
        self.note_change()

    def reached(self, one: Member) -> ReachedLimit | None:
        """Return the limit that keeps a revision from the workers that it wants; None without such a limit."""
        short = self._short.get(one)
        return short.reached if short is not None else None

    def admit(self, one: Member, missing: int, seen: Seen, now_s: float) -> Sequence[MemoryByGpu] | None:
        """Return the GPU memory of `missing` more workers of a revision; an empty list for workers without GPUs.

        Return None if there is no room for all of them. Then the next allocation decides.
        """
        plan = self._plan(one, missing, seen) if missing else ()
        if plan is None:
            self._wait(one, missing, seen.ready + seen.starting, now_s)
        else:
            self._note_short(one, None)
        return plan

    def _plan(self, one: Member, missing: int, seen: Seen) -> Sequence[MemoryByGpu] | None:
        """Return the GPU memory of `missing` more awake workers of a revision; None if there is no room for all of them.

        The workers that other revisions wait for count as present workers.
        """
        starting = max(0, missing - seen.parked)
        for scope, most in ((None, self._most), (one.owner, self.of_owner(one.owner))):
            if most is not None and self._taken(one, scope) + starting > most:
                return None
        others = (other.gpu_need for other in self._short if other is not one)
        if one.gpu_need is not None and any(need is not None for need in others):
            return None
        return self._gpus.plan(one, one.replicas.parked, missing)

    def _taken(self, one: Member, owner: str | None) -> int:
        """Return the number of workers that all revisions have, and that revisions other than `one` wait for."""
        present = sum(each.replicas.total for each in self._all() if owner in (None, each.owner))
        waiting = (other for other in self._short if other is not one and owner in (None, other.owner))
        return present + sum(self._short[other].missing for other in waiting)

    def _all(self) -> Iterator[Member]:
        """Yield the revisions that have processes or may get some."""
        return chain(self.members.values(), self._leaving.values())

    def _wait(self, one: Member, missing: int, awake: int, now_s: float) -> None:
        """Let the next allocation decide how many of the `missing` workers a revision gets, in addition to its `awake` workers."""
        since_s = now_s if one.observed.urgent else math.inf
        short = self._short.get(one, _Short(since_s, missing))
        if (since_s < math.inf) != (short.since_s < math.inf) or awake == 0 < short.awake:
            # The wait begins anew, also after the last worker of the revision has died. Otherwise a revision whose workers
            # die at their start would take all turns.
            short = short._replace(since_s=since_s)
        self._note_short(one, short._replace(missing=missing, awake=awake))
        self.note_change()

    def _note_short(self, one: Member, short: _Short | None) -> None:
        before = self._short.pop(one, None)
        if short is not None:
            self._short[one] = short
        elif before is not None:
            one.note_limit(None, 0)
            self.note_change()
        if before is not short:
            self._gpus.rehearsals.waiting = sum(other.gpu_need is not None for other in self._short)

    # -- the allocation

    def note_offer(self) -> None:
        """If revisions wait, allocate again, because a revision gives up workers or wants another number of workers."""
        if self._short:
            self.note_change()

    def note_change(self) -> None:
        """If revisions wait, allocate again, because there may be room or a worker has become idle.

        If no revision waits, renew a standby that could not rehearse and has room now.
        """
        if not self._short:
            self._pending = False
            self._agenda.drop(ALLOCATION)
            self._gpus.rehearsals.renew()
        elif not self._pending:
            if self._rested_at_s <= time.monotonic():
                self.allocate_soon()
            else:
                self._pending = True
                self._agenda.add(ALLOCATION, self._rested_at_s)

    def allocate_soon(self) -> None:
        """Allocate in the next turn of the event loop, unless nothing waits then."""
        self._pending = True
        asyncio.get_running_loop().call_soon(self._allocate)

    def shrink(self) -> None:
        """Allocate even if no revision waits: an owner's limit has become smaller, and the workers beyond it have to
        end.
        """
        self._shrunk = True
        self.allocate_soon()

    def _allocate(self) -> None:
        """Share the workers and the GPU memory among all revisions, and have the revisions carry out their grants."""
        if not (self._pending or self._shrunk):
            return
        shrunk, self._pending, self._shrunk, now_s = self._shrunk, False, False, time.monotonic()
        self._agenda.drop(ALLOCATION)
        if not (self._short or shrunk):
            return
        present = (one for one in self._all() if one.replicas.total or one in self._short)
        # Include the owners of bookings: a process that ends may use GPU memory for a moment after its revision was forgotten.
        members = list(dict.fromkeys(chain(present, cast("list[Member]", self._gpus.owners))))
        claims = [self._claim(one) for one in members]
        allocation = allocate(claims, self._limits(members), self._gpus.gpus, now_s)
        self._rested_at_s = time.monotonic() + (time.monotonic() - now_s) * (1 / MOST_SHARE - 1)
        self._carry_out(allocation, members, now_s)
        if self._short:
            self._agenda.add(ALLOCATION, max(allocation.again_s, self._rested_at_s))

    def _claim(self, one: Member) -> RevisionClaim:
        """Return the claim of a revision. A retiring revision wants nothing, because its last row is out of date."""
        claim = one.observed.claim(self._short[one].since_s if one in self._short else math.inf)
        return claim if one.key in self.members else claim._replace(wants={}, awake=0, held=0)

    def _limits(self, members: list[Member]) -> Limits:
        owners = {one.owner for one in members}
        known = {owner: most for owner in owners if (most := self.of_owner(owner)) is not None}
        return Limits(self._most, known, self.drain_s)

    def _carry_out(self, allocation: Allocation, members: list[Member], now_s: float) -> None:
        changed = list[Member]()
        # First stop and park the workers that make room for other workers.
        for one in members:
            if (grant := allocation.grants.get(one.key)) and (grant.stop or grant.park or grant.end):
                one.carry_out.grant(grant._replace(start=(), wake=()), *one.observed.update_row(now_s))
                changed.append(one)
                if (short := self._short.get(one)) is not None and short.since_s < math.inf:
                    # Until now the revision had workers, so its wait begins now.
                    self._short[one] = short._replace(since_s=now_s)
        for one in members:
            grant = allocation.grants.get(one.key, Grant())
            if grant.start or grant.wake:
                one.carry_out.grant(grant._replace(stop=(), park=(), end=()), *one.observed.update_row(now_s))
                changed.append(one)
            if one in self._short:
                self._learn(one, grant, now_s)
        for one in dict.fromkeys(changed):
            asyncio.get_running_loop().call_soon(one.look)

    def _learn(self, one: Member, grant: Grant, now_s: float) -> None:
        """Record which limit keeps workers from a revision, or that no limit keeps workers from it any more."""
        short = self._short[one]
        if grant.limit is None:
            self._note_short(one, None)
            return
        if short.reached is None or short.reached.name != grant.limit.name:
            row, seen = one.observed.update_row(now_s)
            one.note_limit(grant.limit, row.start(seen))
        self._short[one] = short._replace(reached=grant.limit)


class Reconciler:
    """Looks at the revisions of a node, after events and at due times."""

    def __init__(
        self, gpus: GpuBookings, most: int | None, of_owner: Callable[[str], int | None], drain_s: float
    ) -> None:
        """`most` is the limit of workers of all functions together. `of_owner` returns the limit of one owner's
        functions. None means no limit. After callers have waited for `drain_s`, replaced revisions end calls to make room."""
        self.gpus, self.agenda = gpus, Agenda(self._on_due)
        self.limits = SharedLimits(gpus, self.agenda, most, of_owner, drain_s)
        self._looks = 0

    async def readings(self) -> list[Reading]:
        """Return the number of looks at revisions so far."""
        text = "Looks at revisions, each of which computes the number of workers and acts."
        return [Reading("reconciler_looks", text, {(): self._looks}, (), total=True)]

    def look(self, one: Member, arriving: int = 0) -> None:
        """Have a revision start, wake, stop and park workers until it has the number of workers that its row names."""
        if one.key not in self.limits.members:
            return
        self._looks += 1
        now_s, before = time.monotonic(), one.observed.row
        again_s = one.observed.advance(now_s)
        for _ in range(MOST_LOOKS):
            row, seen = one.observed.update_row(now_s, arriving)
            if not self._act(one, row, seen, now_s):
                break
        one.carry_out.at_rest(row.rest)
        one.settle(now_s)
        if row.wants != before.wants:
            self.limits.note_offer()
        self.look_by(one.key, min(row.again_s, again_s))

    def _act(self, one: Member, row: Row, seen: Seen, now_s: float) -> bool:
        """Carry out a row. Return True if workers woke, stop or park: then the revision has a new row."""
        if (planned := self.limits.admit(one, row.start(seen), seen, now_s)) is None:
            return False
        changed = one.carry_out.row(row, seen, planned)
        if changed:
            # Waiting revisions may get workers now, because a parked worker can make room sooner than a ready worker.
            self.limits.note_offer()
        return changed

    def look_by(self, key: str, when_s: float) -> None:
        """Look again at a revision at this time, unless an earlier look is due."""
        if key in self.limits.members:
            self.agenda.add(key, when_s)

    def _on_due(self, key: str) -> None:
        if key == ALLOCATION:
            self.limits.allocate_soon()
        else:
            # Each look runs in a callback of its own, so that an error in one look does not stop the others.
            asyncio.get_running_loop().call_soon(self.limits.members[key].look)

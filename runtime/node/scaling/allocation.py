"""Shares the workers of a node, the workers of each owner and the memory of GPUs among revisions. It does no I/O and reads no clock.

All present and wanted workers are served in one order (`_Revision.order`). Each worker takes a place within the limits,
and its GPU memory. A present worker that finds no room parks or ends. A wanted worker that finds no room is refused. So
the result reserves room for a wanted worker at once, but the worker starts only after the present processes have left
that room: the caller allocates again after each event.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ...ground.settings.scale_spec import ReachedLimit
from .claims import (
    NO_GRANT,
    NOTHING,
    Allocation,
    Grant,
    Limits,
    NodeProcess,
    ProcessState,
    RevisionClaim,
    WorkerTier,
)
from .placement import Gpu, GpuNeed, MemoryByGpu, candidates
from .replacements import Replacements

# A worker that had a call within this time counts as a worker that callers need.
LATELY_S = 1.0
# A revision keeps its first worker for this time after the worker became ready. After that, a revision whose callers
# have waited for this time without a worker comes before it.
PATIENCE_S = 10.0
# The cost of displacing a worker is computed per freed byte. A worker without GPU memory to free counts with this many
# bytes.
CPU_WORKER_BYTES = float(1 << 30)


def allocate(
    claims: Iterable[RevisionClaim], limits: Limits, gpus: Sequence[Gpu], now_s: float
) -> Allocation:
    """Return which workers start, wake, park and end.

    The result is idempotent: after it was applied, a second call at the same time returns nothing to do. The keys of
    the claims must differ. The order of the claims is irrelevant.
    """
    present = [claim for claim in claims if claim.processes or claim.wants]
    revisions = _shared(present, limits, gpus, now_s)
    grants = {one.claim.key: one.grant for one in revisions if one.grant is not NO_GRANT}
    refused = any(one.refused for one in revisions)
    again_s = min((one.due_s for one in revisions if refused), default=math.inf)
    replaced = Replacements(present, grants)
    for function, due_s in replaced.waited_for(limits.drain_s):
        if due_s > now_s:
            again_s = min(again_s, due_s)
            continue
        without = _shared(replaced.without_old_calls(function), limits, gpus, now_s)
        replaced.end(function, {one.claim.key: one.grant for one in without})
    return Allocation(grants, again_s)


def _shared(
    claims: Iterable[RevisionClaim], limits: Limits, gpus: Sequence[Gpu], now_s: float
) -> list[_Revision]:
    revisions = [_Revision(claim, now_s) for claim in claims]
    _Sharing(revisions, limits, gpus).share()
    return revisions


_Order: TypeAlias = tuple[int, int, int, int, float, float, str]
"""Tier; turn within the tier; number of the worker; 0 for a busy, 1 for an idle and 2 for a missing worker; the time
since which the revision waits; negative cost; key of the claim."""


@dataclass(slots=True, eq=False)
class _Member:
    """A present worker or standby that may have to make room."""

    process: NodeProcess
    order: _Order
    stays: MemoryByGpu
    """The GPU memory that it needs to stay as it is."""
    undecided: bool = True


_STATE_ORDER = {state: number for number, state in enumerate(ProcessState)}


def _strength(process: NodeProcess) -> tuple[int, int, float]:
    return _STATE_ORDER[process.state], -process.calls, -process.used_s


def _tiers(wants: Mapping[WorkerTier, int]) -> list[WorkerTier]:
    """Return the tier of each wanted worker: the strongest tier that wants it."""
    tiers = list[WorkerTier]()
    for tier in sorted(wants):
        tiers += [tier] * (wants[tier] - len(tiers))
    if tiers and tiers[0] is WorkerTier.LOAD:
        tiers[0] = WorkerTier.FIRST
    return tiers


class _Revision:
    """A claim, its undecided members, and the decisions so far. Lists of undecided members end with the strongest."""

    def __init__(self, claim: RevisionClaim, now_s: float) -> None:
        self.claim, self.now_s = claim, now_s
        self.grant, self.due_s = NO_GRANT, math.inf
        # True if a further worker was refused.
        self.refused = False
        # The valid entry of this revision in the queue of `_Sharing`.
        self.entry: _Order | None = None
        self.tiers = _tiers(claim.wants)
        self.processes = sorted(claim.processes, key=_strength)
        starting = sum(one.state is ProcessState.STARTING for one in self.processes)
        # The number of workers that are awake in the result. `kept` are the ready workers among them, the strongest first.
        self.awake = self.starting = starting
        self.kept: list[_Member] = []
        # The number of workers that are parked in the result.
        self.spared = 0
        self.ready: list[_Member] = []
        # Parked workers, and ready workers that can only stay if they park.
        self.parked: list[_Member] = []
        self.standbys: list[_Member] = []
        # A worker that starts cannot be displaced, so it needs no number: the ready workers have the first numbers.
        for number, one in enumerate(self.processes[starting:], 1):
            if one.state is ProcessState.STANDBY:
                last = (WorkerTier.STANDBY, 0, 0, 0, 0.0, 0.0, claim.key)
                self.standbys.append(_Member(one, last, one.holding))
            elif one.restores or (one.state is ProcessState.READY and number + starting <= claim.held):
                # List a worker that restores its weights even beyond `held`. The row never ends such a worker, but the
                # allocation may end it to make room.
                self.ready.insert(0, _Member(one, self.order(number, one), one.holding))
            elif one.state is ProcessState.PARKED and number + starting <= claim.held:
                stays = one.holding if one.parked is None else one.parked
                self.parked.insert(0, _Member(one, self.spare_order(number + starting, one), stays))

    @property
    def deployed(self) -> bool:
        """True if its first worker is the proof of a deploy."""
        return bool(self.tiers) and self.tiers[0] is WorkerTier.PROOF

    @property
    def lacks(self) -> bool:
        """True if it wants another worker, and no worker has been refused."""
        return self.awake < len(self.tiers) and not self.refused

    def note(
        self, limit: ReachedLimit | None = None, *, start: tuple[MemoryByGpu | None, ...] = (),
        wake: tuple[Hashable, ...] = (), park: tuple[Hashable, ...] = (), stop: tuple[Hashable, ...] = (),
    ) -> None:  # fmt: skip
        """Add steps to the grant. If the grant already names a limit, that limit stays."""
        had = self.grant
        self.grant = Grant(
            had.start + start, had.wake + wake, had.park + park, had.stop + stop, limit=had.limit or limit
        )

    def next_order(self) -> _Order | None:
        """Return the order of the next decision; None if all decisions are made."""
        if self.ready:
            member, number = self.ready[-1], len(self.kept) + 1
            # A worker moves up if a stronger worker was displaced.
            return member.order if member.order[2] == number else self.order(number, member.process)
        if self.lacks:
            return self.order(self.awake + 1)
        rest = self.parked or self.standbys
        return rest[-1].order if rest else None

    def order(self, number: int, ready: NodeProcess | None = None) -> _Order:
        """Return the order of the worker with this number, from 1: a `ready` worker, or None for a missing worker.

        Ready workers of `scale.min` come before a missing worker of a proof. The proof displaces such ready workers
        only if they are of its own function.
        """
        tier = self.tiers[number - 1] if number <= len(self.tiers) else WorkerTier.KEEP
        if ready is not None and tier > WorkerTier.LOAD and self._lately(ready):
            tier = WorkerTier.LOAD
        turn = self._turn(ready) if tier is WorkerTier.FIRST else 0
        if tier is WorkerTier.PROOF and ready is None:
            turn = 2
        elif tier is WorkerTier.OWNER and ready is not None:
            tier, turn = WorkerTier.PROOF, 1
        if ready is None:
            return tier, turn, number, 2, self.claim.waiting_since_s, 0.0, self.claim.key
        if ready.calls:
            return tier, turn, number, 0, math.inf, 0.0, self.claim.key
        return tier, turn, number, 1, math.inf, -self._cost(ready), self.claim.key

    def spare_order(self, number: int, process: NodeProcess) -> _Order:
        """Return the order of a worker that stays parked, or that parks to make room."""
        return WorkerTier.KEEP, 0, number, 1, math.inf, -self._cost(process), self.claim.key

    def _lately(self, ready: NodeProcess) -> bool:
        return ready.calls > 0 or self._ahead(ready.used_s + LATELY_S)

    def _turn(self, ready: NodeProcess | None) -> int:
        claim = self.claim
        if ready is None:
            return 3 if self._ahead(claim.waiting_since_s + PATIENCE_S) else 1
        # A worker that starts keeps its place until it is ready: otherwise slow starts would end each other.
        started = claim.first_since_s < math.inf
        return 0 if not started or self._ahead(claim.first_since_s + PATIENCE_S) else 2

    def _ahead(self, at_s: float) -> bool:
        """Return True if `at_s` is in the future. Then allocate again at that time, because the order changes."""
        if at_s <= self.now_s:
            return False
        self.due_s = min(self.due_s, at_s)
        return True

    def _cost(self, idle: NodeProcess) -> float:
        freed_mb = sum(idle.holding.values()) - sum(_left(idle).values())
        return self.claim.cost(float(freed_mb << 20) if freed_mb > 0 else CPU_WORKER_BYTES)


class _Places:
    """The number of further workers that the limits of the node and of each owner allow."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        scopes = ((None, limits.node), *limits.owners.items())
        self._left = {scope: most for scope, most in scopes if most is not None}
        # The limits that a worker of a deploy exceeds. At most one worker exceeds each limit.
        self._exceeded: set[str | None] = set()

    def reached(self, owner: str, *, proves: bool = False) -> ReachedLimit | None:
        for scope in (owner, None):
            left = self._left.get(scope, 1)
            if left <= 0 and not (left == 0 and proves and scope not in self._exceeded):
                return self._limit(scope)
        return None

    def _limit(self, scope: str | None) -> ReachedLimit:
        if scope is not None:
            return ReachedLimit("owner_limit", self._limits.owners[scope])
        return ReachedLimit("max_workers", self._limits.node or 0)

    def take(self, owner: str, *, proves: bool = False) -> None:
        for scope in (None, owner):
            if proves and scope not in self._exceeded:
                self._exceeded.add(scope)
            elif scope in self._left:
                self._left[scope] -= 1

    def give_back(self, owner: str) -> None:
        for scope in (None, owner):
            if scope in self._left:
                self._left[scope] += 1


class _Loss(NamedTuple):
    """The loss that a displacement of workers from GPUs causes."""

    busy_mb: float = 0
    """The memory, in MiB, of displaced workers with calls."""
    cost: float = 0.0
    """The additional waiting that later callers have because idle workers are displaced."""


NO_LOSS = _Loss()


class _GpuMemory:
    """The free memory of each GPU: `_free` is what the workers decided so far leave, and `_free_now` is what the
    present processes leave.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self._free = Counter({gpu.id: gpu.memory_mb for gpu in gpus})
        self._free_now = Counter(self._free)
        self._members: dict[str, list[_Member]] = {}

    def add(self, member: _Member) -> None:
        for gpu in member.stays:
            self._members.setdefault(gpu, []).append(member)

    def fits(self, wanted: MemoryByGpu) -> bool:
        return all(self._free[gpu] >= memory_mb for gpu, memory_mb in wanted.items())

    def take(self, holding: MemoryByGpu) -> None:
        if holding:
            self._free.subtract(holding)

    def give_back(self, holding: MemoryByGpu) -> None:
        self._free.update(holding)

    def observe(self, holding: MemoryByGpu) -> None:
        if holding:
            self._free_now.subtract(holding)

    def book(self, wanted: MemoryByGpu, instead: MemoryByGpu) -> bool:
        """Reserve `wanted` in place of the holding `instead`. Return True if present processes leave that room."""
        more = {gpu: memory_mb - instead.get(gpu, 0) for gpu, memory_mb in wanted.items()}
        self._free_now.subtract(more)
        return all(self._free_now[gpu] >= 0 for gpu in more if more[gpu] > 0)

    def place(self, need: GpuNeed, aside: Sequence[_Member], own: MemoryByGpu) -> MemoryByGpu | None:
        """Return the holding with which a worker displaces least; None if stronger workers leave no room.

        The members of `aside` make room first.
        """
        able = [gpu for gpu in candidates(self.gpus, need) if self._room(gpu.id, aside) >= need.of(gpu)]
        if len(able) < need.gpus:
            return None
        # If two GPUs need no displacement, prefer the GPU whose memory is free already, and then the fuller GPU.
        if len(able) > need.gpus:
            able.sort(key=lambda gpu: self._key(gpu.id, need.of(gpu), aside, own))
        return {gpu.id: need.of(gpu) for gpu in able[: need.gpus]}

    def _key(self, gpu: str, memory_mb: int, aside: Sequence[_Member], own: MemoryByGpu) -> tuple[float, ...]:
        beside = self._beside_all(gpu)
        short, waits = max(0, memory_mb - beside), self._free_now[gpu] + own.get(gpu, 0) < memory_mb
        return *self._loss(gpu, memory_mb, aside), short, waits, beside

    def loss(self, wanted: MemoryByGpu, aside: Sequence[_Member]) -> _Loss:
        """Return the loss if a worker with the holding `wanted` displaces other processes."""
        losses = [self._loss(gpu, memory_mb, aside) for gpu, memory_mb in wanted.items()]
        return _Loss(*map(sum, zip(*losses, strict=True)))

    def _loss(self, gpu: str, memory_mb: int, aside: Sequence[_Member]) -> _Loss:
        undecided = [one for one in self._members.get(gpu, ()) if one.undecided and one not in aside]
        short_mb = memory_mb - self._room(gpu, aside) + sum(one.stays[gpu] for one in undecided)
        busy_mb, cost = 0, 0.0
        if short_mb > 0:
            undecided.sort(key=lambda one: one.order)
        while short_mb > 0 and undecided:
            weakest = undecided.pop()
            freed_mb = weakest.stays[gpu] - _left(weakest.process).get(gpu, 0)
            short_mb -= freed_mb
            if weakest.process.calls:
                busy_mb += freed_mb
            else:
                cost -= weakest.order[5] * freed_mb
        return _Loss(busy_mb, cost)

    def short(self, wanted: MemoryByGpu) -> list[str]:
        """Return the GPUs of `wanted` that have too little free memory for `wanted` beside all present workers."""
        return [gpu for gpu, memory_mb in wanted.items() if self._beside_all(gpu) < memory_mb]

    def _beside_all(self, gpu: str) -> int:
        return self._free[gpu] - sum(one.stays[gpu] for one in self._members.get(gpu, ()) if one.undecided)

    def _room(self, gpu: str, aside: Sequence[_Member]) -> int:
        return self._free[gpu] + sum(one.stays.get(gpu, 0) for one in aside if not one.undecided)


def _can_park(process: NodeProcess) -> bool:
    return process.state is ProcessState.READY and not process.calls and process.parked is not None


def _left(process: NodeProcess) -> MemoryByGpu:
    """Return the memory that a process still holds after it made room: it parks if it can, and otherwise ends."""
    return process.parked or NOTHING if _can_park(process) else NOTHING


class _Way(NamedTuple):
    """A way to give a revision another worker."""

    loss: _Loss
    member: _Member | None
    """The parked worker that wakes; None if a new worker starts."""
    holding: MemoryByGpu


class _Sharing:
    """Serves the members of all revisions in one order."""

    def __init__(self, revisions: Sequence[_Revision], limits: Limits, gpus: Sequence[Gpu]) -> None:
        self._revisions = revisions
        # `_places` has the places that the workers decided so far leave free. `_places_now` has the places that the
        # present processes leave free.
        self._places, self._places_now = _Places(limits), _Places(limits)
        self._memory = _GpuMemory(gpus)
        self._gpus = ReachedLimit("gpus", len(gpus))
        self._queue: list[tuple[_Order, int, _Revision]] = []
        self._count = itertools.count()

    def share(self) -> None:
        for one in self._revisions:
            self._observe(one)
            self._push(one)
        while self._queue:
            order, _, one = heapq.heappop(self._queue)
            if order is one.entry:
                self._serve(one)
                self._push(one)

    def _observe(self, one: _Revision) -> None:
        """Count the present processes of a revision. Its starting workers keep their room."""
        owner, proves, first = one.claim.owner, one.deployed and not one.ready, one.deployed
        for process in one.processes:
            state = process.state
            self._memory.observe(process.holding)
            if state is ProcessState.STARTING:
                self._places.take(owner, proves=proves)
                self._memory.take(process.holding)
            if state is not ProcessState.STANDBY and state is not ProcessState.LEAVING:
                self._places_now.take(owner, proves=first and state is not ProcessState.DRAINING)
                first = False
        for member in (*one.ready, *one.parked):
            if member.stays:
                self._memory.add(member)

    def _push(self, one: _Revision) -> None:
        one.entry = one.next_order()
        if one.entry is not None:
            heapq.heappush(self._queue, (one.entry, next(self._count), one))

    def _serve(self, one: _Revision) -> None:
        if one.ready:
            self._keep(one, one.ready.pop())
        elif one.lacks:
            self._extend(one)
        elif one.parked:
            self._spare(one, one.parked.pop())
        else:
            self._stand_by(one, one.standbys.pop())

    def _keep(self, one: _Revision, member: _Member) -> None:
        """Let a ready worker stay, if there is room."""
        member.undecided, proves = False, one.deployed and not one.kept
        if (limit := self._reached(one, member.stays, proves=proves)) is not None:
            if member.process.calls and one.starting and one.awake >= len(one.tiers):
                # Do not end this worker with calls. The revision has a worker too many, but the starting worker can make
                # room once it is ready and idle.
                one.note(limit)
            else:
                self._displace(one, member, limit)
            return
        self._take(one, member.stays, proves=proves)
        one.awake += 1
        one.kept.append(member)

    def _spare(self, one: _Revision, member: _Member) -> None:
        """Let a worker stay parked, or park, if there is room."""
        member.undecided = False
        if (limit := self._reached(one, member.stays)) is not None:
            one.note(limit, stop=(member.process.key,))
            return
        if one.awake + one.spared >= one.claim.held:
            # The workers that were served before it already fill `held`, so this worker stops.
            one.note(stop=(member.process.key,))
            return
        self._take(one, member.stays)
        one.spared += 1
        if member.process.state is ProcessState.READY:
            one.note(park=(member.process.key,))

    def _stand_by(self, one: _Revision, member: _Member) -> None:
        if self._memory.fits(member.stays):
            self._memory.take(member.stays)
        else:
            one.note(self._gpus, stop=(member.process.key,))

    def _extend(self, one: _Revision) -> None:
        """Wake or start a worker. If other processes still use the room for the worker, only reserve that room."""
        proves = one.deployed and not one.awake
        rivals = self._replaced(one) if proves else ()
        limit = self._places.reached(one.claim.owner, proves=proves)
        way = self._way(one, [member for _, member in rivals]) if limit is None else None
        if way is None:
            one.refused = True
            one.note(limit or self._gpus)
            return
        self._make_way(way.holding, rivals)
        if way.member is not None:
            self._wake(one, way.member)
        else:
            self._start(one, way.holding, proves=proves)
        self._take(one, way.holding, proves=proves)
        one.awake += 1

    def _way(self, one: _Revision, aside: Sequence[_Member]) -> _Way | None:
        """Choose a parked worker or a new worker; None if there is no room.

        The chosen way displaces the least memory of busy workers. Among equal ways, prefer a parked worker, and then
        the smaller loss.
        """
        memory, need = self._memory, one.claim.need
        if need is None:
            return _Way(NO_LOSS, one.parked[-1] if one.parked else None, NOTHING)
        ways = [
            _Way(memory.loss(member.process.full, [member]), member, member.process.full)
            for member in reversed(one.parked)
            if member.process.state is ProcessState.PARKED and memory.fits(member.process.full)
        ]
        own = one.standbys[-1].stays if one.standbys else NOTHING
        if (found := memory.place(need, aside, own)) is not None:
            ways.append(_Way(memory.loss(found, aside), None, found))
        return min(ways, key=lambda way: (way.loss[0], way.member is None, way.loss), default=None)

    def _wake(self, one: _Revision, member: _Member) -> None:
        one.parked.remove(member)
        member.undecided = False
        if self._memory.book(member.process.full, member.process.holding):
            one.note(wake=(member.process.key,))
        else:
            one.note(self._gpus)

    def _start(self, one: _Revision, holding: MemoryByGpu, *, proves: bool) -> None:
        own = one.standbys.pop().stays if one.standbys else NOTHING
        limit = self._places_now.reached(one.claim.owner, proves=proves)
        if limit is None:
            self._places_now.take(one.claim.owner, proves=proves)
        if not self._memory.book(holding, own):
            limit = limit or self._gpus
        if limit is None:
            one.note(start=(holding or None,))
        else:
            one.note(limit)

    # -- a deploy

    def _replaced(self, one: _Revision) -> list[tuple[_Revision, _Member]]:
        """Return the workers of the old revision, the weakest first."""
        return [
            (other, member)
            for other in self._revisions
            if other.claim.function == one.claim.function and other is not one
            for member in (*other.parked, *other.ready, *reversed(other.kept))
        ]

    def _make_way(self, wanted: MemoryByGpu, rivals: Iterable[tuple[_Revision, _Member]]) -> None:
        """Displace workers of the old revision until there is room beside all other workers."""
        for other, member in rivals:
            short = self._memory.short(wanted)
            if not any(gpu in member.stays for gpu in short):
                continue
            if member.undecided:
                (other.ready if member in other.ready else other.parked).remove(member)
                member.undecided = False
            else:
                other.kept.remove(member)
                other.awake -= 1
                self._places.give_back(other.claim.owner)
                self._memory.give_back(member.stays)
            self._displace(other, member, self._gpus)
            self._push(other)

    def _reached(self, one: _Revision, holding: MemoryByGpu, *, proves: bool = False) -> ReachedLimit | None:
        limit = self._places.reached(one.claim.owner, proves=proves)
        return limit or (None if self._memory.fits(holding) else self._gpus)

    def _take(self, one: _Revision, holding: MemoryByGpu, *, proves: bool = False) -> None:
        self._places.take(one.claim.owner, proves=proves)
        self._memory.take(holding)

    def _displace(self, one: _Revision, member: _Member, limit: ReachedLimit) -> None:
        """Displace a worker. If the limit is GPU memory and the parked worker has room, the worker parks. Otherwise it ends."""
        process = member.process
        if limit is not self._gpus or not _can_park(process):
            one.note(limit, stop=(process.key,))
            return
        one.note(limit)
        one.parked.append(_Member(process, one.spare_order(one.awake + 1, process), _left(process)))

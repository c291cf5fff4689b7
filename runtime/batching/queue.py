"""The queue of one revision: takes or refuses what arrives, and says what runs next. Pure: the time is an argument.

The gateway runs it, and so does the simulator: what is measured of one holds for the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ...errors import Overloaded, QueueFull
from .admission import Load, drained_s, finish_s
from .arrival_pattern import ArrivalPattern
from .batch_forming import Situation, saving, too_late, wait_until
from .fair_queue import FIRST, FairQueue, Waiting
from .latency_curve import LatencyCurve
from .reservations import Reservations

# A caller is told to come again when there is room, but never at once and never in the far future.
MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0


class Item(Waiting, Protocol):
    """What is asked of an invocation."""

    @property
    def body(self) -> bytes: ...
    @property
    def patient(self) -> bool:
        """Whether it waits for as long as it takes, as a stored job does: it is never refused for being late."""
        ...

    @property
    def timeout_s(self) -> float:
        """How long it had until its deadline when it came."""
        ...

    @property
    def company(self) -> int:
        """With how many it may run together at most; 0: with as many as there is room for."""
        ...


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where groups run: how many at a time, and when the next one could start (now, if a lane is free)."""

    count: int
    free_at_s: float


@dataclass(slots=True)
class Next(Generic[T]):
    """What to do now: run `taken` together, tell each of `refused`, or ask again at `wait_until_s`."""

    taken: list[T] = field(default_factory=list)
    refused: list[T] = field(default_factory=list)
    wait_until_s: float | None = None


class Queue(Generic[T]):
    """`limit` is how many a worker runs together; `most` how many may wait."""

    def __init__(self, name: str, *, limit: int, most: int, curve: LatencyCurve | None = None) -> None:
        self.limit = limit
        self.most = most
        self.curve = curve or LatencyCurve()
        self._name = name
        self._turns: FairQueue[T] = FairQueue()
        self._returns = ArrivalPattern()
        self._promises = Reservations()
        self._kept: set[int] = set()
        self.margin_s = 0.0
        """How long it takes from the end of a group until all of it have their answers."""

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[T]:
        return iter(self._turns)

    # -- arrivals

    def admit(self, item: T, now_s: float, lanes: Lanes) -> None:
        """Takes an item that just arrived. Raises QueueFull, or Overloaded if it would not end within its deadline."""
        if len(self._turns) >= self.most and self._holds_share(item.tenant):
            self._refuse_full(now_s, lanes)
        self.arrived(now_s)
        busy = lanes.free_at_s > now_s or len(self._turns) > 0
        kept = busy and not item.patient and self.curve.known and self._check(item, now_s, lanes)
        self._turns.add(item, first=kept)

    def _holds_share(self, tenant: str) -> bool:
        """Whether a tenant has as many waiting as each could have at once: nobody fills the queue for the others."""
        held = self._turns.held(tenant)
        tenants = self._turns.tenants + (not held)
        return held * tenants >= self.most or len(self._turns) >= 2 * self.most

    def arrived(self, now_s: float) -> None:
        """An item came that is taken, here or straight to a worker that was free."""
        if self.limit > 1:
            self._returns.arrived(now_s)

    def _check(self, item: T, now_s: float, lanes: Lanes) -> bool:
        """Whether it was promised that it would be served if it came now. Raises Overloaded if there is no time for it."""
        load = self._load(item, now_s, lanes)
        if self._promises.keep(item.tenant, item.body, now_s, item.timeout_s):
            first = Load(now_s, len(self._kept), load.queued, load.lanes, load.limit, load.free_at_s)
            if finish_s(first, self.curve) <= item.deadline_s:
                self._kept.add(id(item))
                return True
        if finish_s(load, self.curve) > item.deadline_s:
            raise self.refusal(item, now_s, lanes)
        return False

    def _load(self, item: T | None, now_s: float, lanes: Lanes) -> Load:
        ahead = self._turns.ahead(item.tenant, item.priority) if item is not None else len(self._turns)
        return Load(now_s, ahead, len(self._turns), max(1, lanes.count), self.limit, lanes.free_at_s)

    def refusal(self, item: T, now_s: float, lanes: Lanes) -> Overloaded:
        """What a caller is told who cannot be served in time, and by which he is recognised when he comes again."""
        wait_s = self._retry_s(now_s, lanes)
        self._promises.make(item.tenant, item.body, now_s, wait_s, item.timeout_s)
        return Overloaded(
            f"Function {self._name!r} has {len(self._turns)} invocations waiting; this one would not end within its deadline.",
            remedy="Try again after the time in Retry-After, allow more time, or raise scale.max in pilotflame.toml.",
            details={"retry_after_s": round(wait_s, 3)},
        )

    def _refuse_full(self, now_s: float, lanes: Lanes) -> None:
        raise QueueFull(
            f"Function {self._name!r} has {len(self._turns)} invocations waiting, its limit.",
            remedy="Try again later, or raise max_queue or scale.max in pilotflame.toml.",
            details={"retry_after_s": round(self._retry_s(now_s, lanes), 3)},
        )

    def _retry_s(self, now_s: float, lanes: Lanes) -> float:
        drained = drained_s(self._load(None, now_s, lanes), self.curve, self._promises.pending(now_s))
        return min(MAX_RETRY_S, max(MIN_RETRY_S, drained - now_s))

    def put_back(self, item: T) -> None:
        """It was given to a worker that did not run it."""
        self._turns.add(item)

    def drop(self, item: T) -> bool:
        """It waits no more; False if it did not wait here."""
        self._kept.discard(id(item))
        return self._turns.drop(item)

    # -- what runs next

    def next(self, start_s: float) -> Next[T]:
        """What to run in a lane that is free at `start_s`, or until when to wait for more."""
        found: Next[T] = Next()
        if not len(self._turns):
            return found
        if self.limit > 1:
            until_s = wait_until(self._situation(start_s), self.curve, self._returns)
            if until_s > start_s:
                found.wait_until_s = until_s
                return found
        self._gather(found, start_s)
        self._sweep(found, start_s)
        return found

    def _sweep(self, found: Next[T], start_s: float) -> None:
        """Refuses those whose turn has not come, and who would be too late if it had: they need not wait for that."""
        while late := [item for item in self._turns.heads() if self._late(item, start_s, len(self._turns))]:
            for item in late:
                self._turns.drop(item)
            found.refused += late

    def _situation(self, now_s: float) -> Situation:
        queued = len(self._turns)
        slack_s = (
            self._turns.urgent_s() - now_s - self.curve.bound(min(self.limit, 2 * queued)) - self.margin_s
        )
        return Situation(now_s, queued, self.limit, slack_s)

    def _gather(self, found: Next[T], start_s: float) -> None:
        most, taken = self.limit, found.taken
        while len(taken) < most and (item := self._turns.take(self.curve.unit)) is not None:
            if item.company and len(taken) >= item.company:
                self._turns.add(item, first=id(item) in self._kept)
                self._refund(item)
                return
            if self._late(item, start_s, len(self._turns) + len(taken) + 1):
                found.refused.append(item)
                self._refund(item)
                continue
            most = min(most, item.company or most)
            self._kept.discard(id(item))
            taken.append(item)

    def _refund(self, item: T) -> None:
        priority = FIRST if id(item) in self._kept else item.priority
        self._turns.charge(item.tenant, priority, -self.curve.unit)

    def _late(self, item: T, start_s: float, together: int) -> bool:
        if item.patient or id(item) in self._kept:
            return False
        # Nothing is gained by refusing what is alone: it may still make it, and nobody waits behind it.
        return together > 1 and too_late(
            item.deadline_s - self.margin_s, start_s, together, self.limit, self.curve
        )

    # -- what became of it

    def ended(self, now_s: float, items: int, cost: float, seconds: float) -> None:
        """A group has ended, after so many seconds in its lane."""
        self.curve.observe(items, cost, seconds)
        if self.limit > 1:
            self._returns.ended(now_s, items, saving(self.curve))

    def charge(self, item: T, cost: float) -> None:
        """What an item cost beyond what was charged when it was taken."""
        self._turns.charge(item.tenant, item.priority, cost - self.curve.unit)

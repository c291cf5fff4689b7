"""The queue of one revision: admits or refuses what arrives, and selects the next batch. Pure.

Admission predicts when an invocation would end and refuses those that would miss their deadline, as Clockwork
(OSDI '20) does; order is that of the fair queue; batches are formed by `batch_forming.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ...errors import Overloaded, QueueFull
from .arrival_pattern import ArrivalPattern
from .batch_forming import Situation, saving, too_late, wait_until
from .fair_queue import FIRST, FairQueue, Waiting
from .latency_curve import LatencyCurve
from .reservations import Reservations

# The limits of Retry-After.
MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
SMOOTHING = 0.1


class Item(Waiting, Protocol):
    """What the queue reads of an invocation."""

    body: bytes
    patient: bool
    """True if it waits as long as it takes, as a stored job does: it is never refused for being late."""
    timeout_s: float
    """The time from its arrival to its deadline."""
    max_batch: int
    """The size of the largest batch it may run in; 0 for no limit."""


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Slots:
    """Where batches run: how many at a time, and when the next one can start (now, if a slot is free)."""

    count: int
    free_at_s: float


@dataclass(frozen=True, slots=True)
class Selection(Generic[T]):
    """Run `batch`, refuse each of `refused`, or ask again at `wait_until_s`."""

    batch: list[T] = field(default_factory=list)
    refused: list[T] = field(default_factory=list)
    wait_until_s: float | None = None


def finish_s(ahead: int, max_batch: int, slots: Slots, now_s: float, curve: LatencyCurve) -> float:
    """Return when an item typically ends: after the rest of what runs, full batches ahead, and its own.

    Typically, not surely: a strict bound would refuse items that the batch they join could still serve. What
    turns out late is refused when its batch is formed.
    """
    rounds, own = divmod(ahead, max_batch * slots.count)
    start_s = max(now_s, slots.free_at_s) + rounds * curve.typical(max_batch)
    return start_s + curve.typical(min(max_batch, own + 1))


def drained_s(waiting: int, max_batch: int, slots: Slots, now_s: float, curve: LatencyCurve) -> float:
    """Return when `waiting` items will have been started."""
    rounds = math.ceil(waiting / (max_batch * slots.count))
    return max(now_s, slots.free_at_s) + rounds * curve.typical(max_batch)


class Queue(Generic[T]):
    """The invocations that wait for a worker of one revision."""

    def __init__(
        self, name: str, *, max_batch: int, max_queue: int, curve: LatencyCurve | None = None
    ) -> None:
        self.curve = curve or LatencyCurve()
        self.max_batch = max_batch
        self._max_queue = max_queue
        self._name = name
        self._waiting: FairQueue[T] = FairQueue()
        self._arrivals = ArrivalPattern()
        self._reservations = Reservations()
        self._reserved: set[int] = set()
        # The mean time from the end of a batch until all its callers have their responses.
        self._response_s = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting)

    def configure(self, *, max_batch: int | None = None, max_queue: int | None = None) -> None:
        self.max_batch = max_batch or self.max_batch
        self._max_queue = max_queue or self._max_queue

    # -- arrivals

    def admit(self, item: T, now_s: float, slots: Slots) -> None:
        """Add an item that just arrived.

        :raises QueueFull: if the queue is full and the item's tenant has its share of it.
        :raises Overloaded: if the item would not end within its deadline.
        """
        if len(self._waiting) >= self._max_queue and self._has_share(item.tenant):
            raise self._full(now_s, slots)
        self.observe_arrival(now_s)
        busy = slots.free_at_s > now_s or len(self._waiting) > 0
        first = busy and not item.patient and self.curve.known and self._check(item, now_s, slots)
        self._waiting.add(item, first=first)

    def _has_share(self, tenant: str) -> bool:
        """Return True if a tenant fills its share of the queue: no tenant can fill it for the others."""
        own = self._waiting.count(tenant)
        tenants = self._waiting.tenants + (not own)
        return own * tenants >= self._max_queue or len(self._waiting) >= 2 * self._max_queue

    def observe_arrival(self, now_s: float) -> None:
        if self.max_batch > 1:
            self._arrivals.observe_arrival(now_s)

    def _check(self, item: T, now_s: float, slots: Slots) -> bool:
        """Return True if the item has a reservation. Raise Overloaded if it would end too late."""
        reserved = self._reservations.use(item.tenant, item.body, now_s, item.timeout_s)
        if reserved and self._finish_s(len(self._reserved), now_s, slots) <= item.deadline_s:
            self._reserved.add(id(item))
            return True
        ahead = self._waiting.ahead(item.tenant, item.priority)
        if self._finish_s(ahead, now_s, slots) > item.deadline_s:
            raise self.refusal(item, now_s, slots)
        return False

    def _finish_s(self, ahead: int, now_s: float, slots: Slots) -> float:
        return finish_s(ahead, self.max_batch, slots, now_s, self.curve)

    def refusal(self, item: T, now_s: float, slots: Slots) -> Overloaded:
        """Return the error for a caller whose deadline cannot be met, and reserve a place for their retry."""
        wait_s = self._retry_s(now_s, slots)
        self._reservations.make(item.tenant, item.body, now_s, wait_s, item.timeout_s)
        return Overloaded(
            f"Function {self._name!r} has {len(self)} invocations waiting;"
            " this one would not end within its deadline.",
            remedy="Try again after the time in Retry-After, allow more time,"
            " or raise scale.max in pilotflame.toml.",
            details={"retry_after_s": round(wait_s, 3)},
        )

    def _full(self, now_s: float, slots: Slots) -> QueueFull:
        return QueueFull(
            f"Function {self._name!r} has {len(self)} invocations waiting, its limit.",
            remedy="Try again later, or raise max_queue or scale.max in pilotflame.toml.",
            details={"retry_after_s": round(self._retry_s(now_s, slots), 3)},
        )

    def _retry_s(self, now_s: float, slots: Slots) -> float:
        waiting = len(self._waiting) + self._reservations.pending(now_s)
        drained = drained_s(waiting, self.max_batch, slots, now_s, self.curve)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, drained - now_s))

    def requeue(self, item: T) -> None:
        """Add an item that a worker was sent and did not run."""
        self._waiting.add(item)

    def remove(self, item: T) -> bool:
        """Remove an item; return False if it does not wait here."""
        self._reserved.discard(id(item))
        return self._waiting.remove(item)

    # -- the next batch

    def next_batch(self, start_s: float) -> Selection[T]:
        """Return what to run in a slot that is free at `start_s`, or until when to wait for more."""
        if not len(self._waiting):
            return Selection()
        if self.max_batch > 1:
            until_s = wait_until(self._situation(start_s), self.curve, self._arrivals)
            if until_s > start_s:
                return Selection(wait_until_s=until_s)
        batch, refused = self._form(start_s)
        return Selection(batch, refused + self._remove_late(start_s))

    def _situation(self, now_s: float) -> Situation:
        queued = len(self._waiting)
        run_s = self.curve.bound(min(self.max_batch, 2 * queued)) + self._response_s
        slack_s = self._waiting.earliest_deadline_s() - now_s - run_s
        return Situation(now_s, queued, self.max_batch, slack_s)

    def _form(self, start_s: float) -> tuple[list[T], list[T]]:
        """Take the next batch from the queue; return it, and the items on the way that would be late."""
        most, batch, late = self.max_batch, list[T](), list[T]()
        while len(batch) < most and (item := self._waiting.pop(self.curve.mean_cost)) is not None:
            if item.max_batch and len(batch) >= item.max_batch:
                self._waiting.add(item, first=id(item) in self._reserved)
                self._refund(item)
                break
            if self._late(item, start_s, len(self._waiting) + len(batch) + 1):
                late.append(item)
                self._refund(item)
                continue
            most = min(most, item.max_batch or most)
            self._reserved.discard(id(item))
            batch.append(item)
        return batch, late

    def _remove_late(self, start_s: float) -> list[T]:
        """Remove and return waiting items that would be late even if they started now."""
        removed: list[T] = []
        while late := [item for item in self._waiting.heads() if self._late(item, start_s, len(self))]:
            for item in late:
                self._waiting.remove(item)
            removed += late
        return removed

    def _refund(self, item: T) -> None:
        priority = FIRST if id(item) in self._reserved else item.priority
        self._waiting.charge(item.tenant, priority, -self.curve.mean_cost)

    def _late(self, item: T, start_s: float, batch: int) -> bool:
        if item.patient or id(item) in self._reserved:
            return False
        # Refusing an item that is alone gains nothing: it delays no other, and may still be on time.
        deadline_s = item.deadline_s - self._response_s
        return batch > 1 and too_late(deadline_s, start_s, batch, self.max_batch, self.curve)

    # -- results

    def observe_batch(self, now_s: float, items: int, cost: float, seconds: float) -> None:
        """Learn from a batch that ended at `now_s` after `seconds` in its slot."""
        self.curve.observe(items, cost, seconds)
        if self.max_batch > 1:
            self._arrivals.observe_end(now_s, items, saving(self.curve))

    def observe_response(self, seconds: float) -> None:
        """Learn how long it takes from the end of a batch until all its callers have their responses."""
        self._response_s += SMOOTHING * (seconds - self._response_s)

    def charge(self, item: T, cost: float) -> None:
        """Charge the item's tenant its real cost in place of the mean it was charged."""
        self._waiting.charge(item.tenant, item.priority, cost - self.curve.mean_cost)

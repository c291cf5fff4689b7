"""Admits or refuses the invocations that arrive for one revision, and selects the next batch. It does no I/O.

Admission predicts when an invocation would end, and refuses it if the predicted end is after its deadline, as
Clockwork (OSDI '20) does. `fair_queue.py` decides the order, and `batch_forming.py` decides when a batch starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ....errors import Overloaded, QueueFull
from ....fair_queue import FIRST, FairQueue, Waiting
from ...ground.access.fair_share import SharedRoom
from .batch_forming import ArrivalPattern, saving, wait_until
from .latency_curve import LatencyCurve
from .reservations import Reservations

# The smallest and the largest Retry-After.
MIN_RETRY_S, MAX_RETRY_S = 0.05, 60.0
# The weight of the latest measurement in the mean response time.
SMOOTHING = 0.1
MAX_QUEUE_BYTES = 512 << 20
"""The most bytes of bodies that wait for one function. They are half of `MAX_WAITING_BYTES`."""
MAX_WAITING_BYTES = 1 << 30
"""The most bytes of bodies that wait in all queues of a gateway. The owners of API keys share them."""


class Item(Waiting, Protocol):
    """The attributes of an invocation that the queue reads."""

    body: bytes
    patient: bool
    """True for a stored job, which may wait for any time and is never refused as late."""
    timeout_s: float
    """The time from its arrival to its deadline."""
    max_batch: int
    """The size of the largest batch it may run in; 0 for no limit."""
    first: bool
    """True after a reservation has put it before the items of all priorities. The queue sets it."""


T = TypeVar("T", bound=Item)


@dataclass(frozen=True, slots=True)
class Slots:
    """How many batches can run at a time on all workers, and when the next batch can start."""

    count: int
    free_at_s: float


@dataclass(frozen=True, slots=True)
class Selection(Generic[T]):
    """The actions for the caller: run `batch`, refuse `refused`, and select again at `wait_until_s`, if set."""

    batch: list[T] = field(default_factory=list)
    refused: list[T] = field(default_factory=list)
    wait_until_s: float | None = None


class Forecast:
    """Predicts when the batches of a queue end. It learns from the batches that ended, their responses and the arrivals."""

    def __init__(self, curve: LatencyCurve, max_batch: int) -> None:
        self.curve, self.max_batch = curve, max_batch
        self.arrivals = ArrivalPattern()
        self.response_s = 0.0
        """The mean number of seconds from the end of a batch until all its callers have their responses."""

    def finish_s(self, ahead: int, now_s: float, slots: Slots) -> float:
        """Return when an item with `ahead` items before it is expected to end."""
        # First a slot becomes free, then the full batches before the item run, and then its own batch. This uses the
        # medians: with the 95th percentiles, many items that can end in time would be refused.
        rounds, own = divmod(ahead, self.max_batch * slots.count)
        start_s = max(now_s, slots.free_at_s) + rounds * self.curve.typical(self.max_batch)
        return start_s + self.curve.typical(min(self.max_batch, own + 1))

    def drained_s(self, waiting: int, now_s: float, slots: Slots) -> float:
        """Return when the batches of `waiting` items are expected to have ended."""
        rounds = math.ceil(waiting / (self.max_batch * slots.count))
        return max(now_s, slots.free_at_s) + rounds * self.curve.typical(self.max_batch)

    def wait_until(self, now_s: float, queued: int, earliest_deadline_s: float) -> float:
        """Return the time until which the next batch waits for more items; `now_s` means not to wait."""
        # Compute the slack of the most urgent item. Assume that its batch grows to twice the present size during the wait.
        run_s = self.curve.bound(min(self.max_batch, 2 * queued)) + self.response_s
        slack_s = earliest_deadline_s - now_s - run_s
        return wait_until(now_s, queued, self.max_batch, slack_s, self.curve, self.arrivals)

    def observe_batch(self, now_s: float, items: int, cost: float, seconds: float) -> None:
        """Learn from a batch of `items` items that ended at `now_s`, after it ran for `seconds`."""
        self.curve.observe(items, cost, seconds)
        if self.max_batch > 1:
            self.arrivals.observe_end(now_s, items, saving(self.curve))

    def observe_response(self, seconds: float) -> None:
        """Learn that all callers of a batch had their responses `seconds` after the batch ended."""
        self.response_s += SMOOTHING * (seconds - self.response_s)


class Queue(Generic[T]):
    """The invocations that wait for a worker of one revision."""

    def __init__(
        self, name: str, *, max_batch: int, max_queue: int, max_bytes: int = MAX_QUEUE_BYTES,
        curve: LatencyCurve | None = None, room: SharedRoom | None = None,
    ) -> None:  # fmt: skip
        """`max_queue` limits the number of waiting items, and `max_bytes` the total size of their bodies. `room` limits the
        total size of the bodies in all queues that share the `room`.
        """
        self._room = room or SharedRoom(MAX_WAITING_BYTES)
        self.forecast = Forecast(curve or LatencyCurve(), max_batch)
        self.curve = self.forecast.curve
        self.admitted = self.emptied = 0
        """The number of items that were admitted, and the number of times that the queue became empty."""
        self._max_queue, self._max_bytes = max_queue, max_bytes
        self._name = name
        self._waiting: FairQueue[T] = FairQueue()
        self._reservations = Reservations()
        # The number of waiting items that a reservation has put first, and the total size of all waiting bodies.
        self._first = self._bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def _in_words(self) -> str:
        return f"{len(self)} invocation{'' if len(self) == 1 else 's'} waiting"

    def __iter__(self) -> Iterator[T]:
        return iter(self._waiting)

    def own_ahead(self, item: T) -> int | None:
        """Return how many items of the same tenant are served before a waiting item; None if it does not wait."""
        return self._waiting.own_ahead(item)

    def configure(self, *, max_queue: int) -> None:
        self._max_queue = max_queue

    # -- arrivals

    def admit(self, item: T, now_s: float, slots: Slots) -> None:
        """Add an item that just arrived. Raise QueueFull, or Overloaded if it would miss its deadline."""
        if len(self._waiting) >= self._max_queue and self._used_its_share(item.tenant, self._max_queue):
            waiting = f"{self._in_words()}; its limit is {self._max_queue} (max_queue)"
            raise self._full(waiting, "max_queue or scale.max", now_s, slots)
        # While the bodies are below the limit, accept one more item, however large its body is.
        if self._bytes >= self._max_bytes and self._used_its_share(item.tenant, len(self._waiting)):
            waiting = f"{self._bytes >> 20} MiB of bodies waiting; its limit is {self._max_bytes >> 20} MiB"
            raise self._full(waiting, "scale.max", now_s, slots)
        if not self._room.takes(item.tenant, len(item.body)):
            message = f"{self._room.total >> 20} MiB of bodies wait in the queues of all functions."
            remedy = "Try again later, or send the addresses of objects instead."
            raise QueueFull(message, remedy=remedy, details={"retry_after_s": self._retry_s(now_s, slots)})
        if self.forecast.max_batch > 1:
            self.forecast.arrivals.observe_arrival(now_s)
        busy = slots.free_at_s > now_s or len(self._waiting) > 0
        if busy and not item.patient and bool(self.curve.points) and self._check(item, now_s, slots):
            item.first = True
        self.admitted += 1
        self.requeue(item)

    def requeue(self, item: T) -> None:
        """Add an item that was admitted. Its deadline and the limits are not checked."""
        self._waiting.add(item, first=item.first)
        self._bytes += len(item.body)
        self._room.add(item.tenant, len(item.body))
        self._first += item.first

    def _note_removed(self, item: T) -> None:
        self._bytes -= len(item.body)
        self._room.remove(item.tenant, len(item.body))
        self._first -= item.first
        if not len(self._waiting):
            self.emptied += 1

    def _used_its_share(self, tenant: str, most: int) -> bool:
        """Return True if a tenant has used up its share of a full queue of `most` items. All shares are equal.

        Items of a tenant below its share are still accepted, until the queue holds twice its limits.
        """
        own = self._waiting.count(tenant)
        tenants = self._waiting.tenants + (not own)
        over = len(self._waiting) >= 2 * self._max_queue or self._bytes >= 2 * self._max_bytes
        return own * tenants >= most or over

    def _full(self, waiting: str, setting: str, now_s: float, slots: Slots) -> QueueFull:
        remedy = f"Try again later, or raise {setting} in pilotflame.toml."
        details = {"retry_after_s": round(self._retry_s(now_s, slots), 3)}
        return QueueFull(f"Function {self._name!r} has {waiting}.", remedy=remedy, details=details)

    def _check(self, item: T, now_s: float, slots: Slots) -> bool:
        """Return True if a reservation puts the item first. Raise Overloaded if the item would end too late."""
        reserved = self._reservations.use(item.tenant, item.body, now_s, item.timeout_s)
        if reserved and self.forecast.finish_s(self._first, now_s, slots) <= item.deadline_s:
            return True
        ahead = self._waiting.ahead(item.tenant, item.priority)
        if self.forecast.finish_s(ahead, now_s, slots) > item.deadline_s:
            raise self.refusal(item, now_s, slots)
        return False

    def refusal(self, item: T, now_s: float, slots: Slots) -> Overloaded:
        """Return the error for an item that would miss its deadline, and add a reservation for its retry."""
        wait_s = self._retry_s(now_s, slots)
        self._reservations.make(item.tenant, item.body, now_s, wait_s, item.timeout_s)
        if (typical_s := self.curve.typical(1)) > item.timeout_s:
            message = f"A call of {self._name!r} takes {typical_s:.3g} s, longer than its time limit of {item.timeout_s:.3g} s."
            remedy = "Send a longer X-Request-Timeout, or raise timeout_s in pilotflame.toml."
            return Overloaded(message, remedy=remedy, details={"retry_after_s": round(wait_s, 3)})
        message = f"Function {self._name!r} has {self._in_words()}; it would miss its deadline."
        remedy = "Try again as Retry-After says, allow more time, or raise scale.max in pilotflame.toml."
        return Overloaded(message, remedy=remedy, details={"retry_after_s": round(wait_s, 3)})

    def _retry_s(self, now_s: float, slots: Slots) -> float:
        """Return the seconds until all waiting items and open reservations are expected to have run."""
        waiting = len(self._waiting) + self._reservations.pending(now_s)
        return min(MAX_RETRY_S, max(MIN_RETRY_S, self.forecast.drained_s(waiting, now_s, slots) - now_s))

    def remove(self, item: T) -> bool:
        """Remove an item. Return False if it is not in the queue."""
        if not self._waiting.remove(item):
            return False
        self._note_removed(item)
        return True

    # -- the next batch

    def next_batch(self, start_s: float) -> Selection[T]:
        """Return the batch for a slot that is free at `start_s`, or the time until which to wait for more items."""
        if not len(self._waiting):
            return Selection()
        if self.forecast.max_batch > 1:
            earliest_s = self._waiting.earliest_deadline_s()
            if (until_s := self.forecast.wait_until(start_s, len(self._waiting), earliest_s)) > start_s:
                return Selection(wait_until_s=until_s)
        batch, refused = self._form(start_s)
        return Selection(batch, refused + self._remove_late(start_s))

    def _form(self, start_s: float) -> tuple[list[T], list[T]]:
        """Remove and return the next batch, and the items before it that would miss their deadlines."""
        most, batch, late = self.forecast.max_batch, list[T](), list[T]()
        while len(batch) < most and (item := self._waiting.pop(self.curve.mean_cost)) is not None:
            self._note_removed(item)
            if item.max_batch and len(batch) >= item.max_batch:
                self.requeue(item)
                self.charge(item, 0.0)
                break
            if self._late(item, start_s, len(self._waiting) + len(batch) + 1):
                late.append(item)
                self.charge(item, 0.0)
                continue
            most = min(most, item.max_batch or most)
            batch.append(item)
        return batch, late

    def _remove_late(self, start_s: float) -> list[T]:
        """Remove and return waiting items that would miss their deadlines if they started at `start_s`."""
        removed: list[T] = []
        while late := [item for item in self._waiting.heads() if self._late(item, start_s, len(self))]:
            for item in late:
                self.remove(item)
            removed += late
        return removed

    def _late(self, item: T, start_s: float, batch: int) -> bool:
        """Return True if an item should be dropped early, as in Nexus (SOSP '19).

        Such an item would be late in a batch of `batch` items that starts at `start_s`, and would delay the other
        items.
        """
        if batch == 1 or item.patient or item.first:
            return False
        run_s = self.curve.bound(min(batch, self.forecast.max_batch)) + self.forecast.response_s
        return start_s + run_s > item.deadline_s

    def charge(self, item: T, cost: float) -> None:
        """Charge the item's tenant with the item's real cost, in place of the mean cost. `cost` is 0 if the item did not run."""
        priority = FIRST if item.first else item.priority
        self._waiting.charge(item.tenant, priority, cost - self.curve.mean_cost)

"""A fair queue: by priority, then between tenants by served cost, then earliest deadline first.

Fairness is that of the virtual token counter (Sheng et al., OSDI '24): of the tenants that wait, the one with the least
served cost is next. A tenant that was idle starts at the least served cost of the others, so idleness earns no credit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the fair queue reads of an item."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...


T = TypeVar("T", bound=Waiting)

# Before the priorities of callers, which begin at 1.
FIRST = 0
# Above so many tenants of one priority, idle ones are forgotten.
MAX_TENANTS = 1024
# A heap is rebuilt once it holds more than so many entries of items that were removed.
MAX_REMOVED = 64


class FairQueue(Generic[T]):
    """An item is in the queue at most once."""

    def __init__(self) -> None:
        self._classes: dict[int, _PriorityClass[T]] = {}
        self._entries: dict[int, _Entry[T]] = {}
        self._counts: dict[str, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no order."""
        return (entry.item for entry in list(self._entries.values()) if entry.item is not None)

    def add(self, item: T, *, first: bool = False) -> None:
        """Add an item; those with equal deadlines keep their order. `first` goes before every priority."""
        priority = FIRST if first else item.priority
        entry = _Entry(item.deadline_s, next(self._numbers), priority, item)
        self._entries[id(item)] = entry
        peers = self._classes.get(priority)
        if peers is None:
            peers = self._classes[priority] = _PriorityClass()
        peers.add(item.tenant, entry)
        self._counts[item.tenant] = self.count(item.tenant) + 1

    def remove(self, item: T) -> bool:
        """Remove an item; return False if it does not wait here."""
        entry = self._entries.pop(id(item), None)
        if entry is None:
            return False
        self._classes[entry.priority].remove(item.tenant, entry)
        self._count_down(item)
        return True

    def pop(self, cost: float = 1.0) -> T | None:
        """Remove and return the next item and charge its tenant `cost`; return None if nothing waits."""
        for priority in sorted(self._classes):
            peers = self._classes[priority]
            if peers.waiting:
                item = peers.pop(cost)
                del self._entries[id(item)]
                self._count_down(item)
                return item
            # Nothing of this priority waits: its tenants start again as equals.
            del self._classes[priority]
        return None

    def _count_down(self, item: T) -> None:
        if left := self._counts[item.tenant] - 1:
            self._counts[item.tenant] = left
        else:
            del self._counts[item.tenant]

    def heads(self) -> list[T]:
        """Return the next item of each tenant of each priority."""
        return [item for peers in self._classes.values() if peers.waiting for item in peers.heads()]

    def count(self, tenant: str) -> int:
        """Return how many items of a tenant wait."""
        return self._counts.get(tenant, 0)

    @property
    def tenants(self) -> int:
        """How many tenants have items that wait."""
        return len(self._counts)

    def charge(self, tenant: str, priority: int, cost: float) -> None:
        """Correct what a tenant was charged by `cost`, which may be negative."""
        if (peers := self._classes.get(priority)) is not None:
            peers.charge(tenant, cost)

    def earliest_deadline_s(self) -> float:
        """Return the earliest deadline of all items; infinity if nothing waits."""
        classes = (peers for peers in self._classes.values() if peers.waiting)
        return min((peers.earliest_deadline_s() for peers in classes), default=math.inf)

    def ahead(self, tenant: str, priority: int) -> int:
        """Return how many items would be served before a new one with the latest deadline of its tenant."""
        count = sum(peers.waiting for other, peers in self._classes.items() if other < priority)
        peers = self._classes.get(priority)
        return count + (peers.ahead(tenant) if peers is not None else 0)


class _Entry(Generic[T]):
    __slots__ = ("deadline_s", "item", "number", "priority")

    def __init__(self, deadline_s: float, number: int, priority: int, item: T) -> None:
        self.deadline_s = deadline_s
        self.number = number
        self.priority = priority
        self.item: T | None = item

    def __lt__(self, other: _Entry[T]) -> bool:
        return (self.deadline_s, self.number) < (other.deadline_s, other.number)

    def clear(self) -> None:
        """Mark the entry as removed; it stays in its heap until it is met."""
        self.item = None


class _TenantQueue(Generic[T]):
    """One tenant's items of one priority."""

    __slots__ = ("heap", "served", "waiting")

    def __init__(self) -> None:
        self.heap: list[_Entry[T]] = []
        self.served = 0.0
        self.waiting = 0

    def add(self, entry: _Entry[T]) -> None:
        self.waiting += 1
        heapq.heappush(self.heap, entry)

    def restart(self, served: float) -> None:
        """Start waiting again after being idle."""
        self.heap.clear()
        self.served = max(self.served, served)

    def remove(self, entry: _Entry[T]) -> None:
        entry.clear()
        self.waiting -= 1
        if len(self.heap) > 2 * self.waiting + MAX_REMOVED:
            self.heap = [kept for kept in self.heap if kept.item is not None]
            heapq.heapify(self.heap)

    def head(self) -> _Entry[T]:
        """Return the next entry; something must wait."""
        while self.heap[0].item is None:
            heapq.heappop(self.heap)
        return self.heap[0]

    def pop(self, cost: float) -> T:
        """Remove and return the next item; something must wait."""
        while (item := heapq.heappop(self.heap).item) is None:
            pass
        self.waiting -= 1
        self.served += cost
        return item

    def charge(self, cost: float) -> None:
        self.served += cost


class _PriorityClass(Generic[T]):
    """The items of one priority, by tenant."""

    __slots__ = ("_tenants", "waiting")

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantQueue[T]] = {}
        self.waiting = 0

    def _active(self) -> Iterator[_TenantQueue[T]]:
        return (queue for queue in self._tenants.values() if queue.waiting)

    def add(self, tenant: str, entry: _Entry[T]) -> None:
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = _TenantQueue()
        if not queue.waiting:
            queue.restart(min((other.served for other in self._active()), default=queue.served))
        queue.add(entry)
        self.waiting += 1
        if len(self._tenants) > MAX_TENANTS:
            self._tenants = {name: kept for name, kept in self._tenants.items() if kept.waiting}

    def remove(self, tenant: str, entry: _Entry[T]) -> None:
        self._tenants[tenant].remove(entry)
        self.waiting -= 1

    def pop(self, cost: float) -> T:
        self.waiting -= 1
        return min(self._active(), key=lambda queue: queue.served).pop(cost)

    def heads(self) -> list[T]:
        return [item for queue in self._active() if (item := queue.head().item) is not None]

    def earliest_deadline_s(self) -> float:
        return min(queue.head().deadline_s for queue in self._active())

    def charge(self, tenant: str, cost: float) -> None:
        if (queue := self._tenants.get(tenant)) is not None:
            queue.charge(cost)

    def ahead(self, tenant: str) -> int:
        own = self._tenants.get(tenant)
        before = own.waiting if own is not None else 0
        # Before its own turn each other tenant is served at most as often as its tenant, plus once.
        return before + sum(min(other.waiting, before + 1) for other in self._active() if other is not own)

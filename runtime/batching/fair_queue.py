"""A fair queue: by priority, then between tenants by served cost, then earliest deadline first.

Fairness is that of the virtual token counter (Sheng et al., OSDI '24): of the tenants that wait, the one with
the least served cost is next. A tenant that was idle starts at the least served cost of the others, so
idleness earns no credit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the fair queue reads of an item."""

    tenant: str
    priority: int
    deadline_s: float


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
        self._classes: dict[int, dict[str, _TenantQueue[T]]] = {}
        self._places: dict[int, tuple[_TenantQueue[T], int]] = {}
        self._counts: Counter[str] = Counter()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no order."""
        return (queue.items[number] for queue, number in list(self._places.values()))

    def add(self, item: T, *, first: bool = False) -> None:
        """Add an item; those with equal deadlines keep their order. `first` goes before every priority."""
        priority = FIRST if first else item.priority
        tenants = self._classes.setdefault(priority, {})
        queue = tenants.get(item.tenant)
        if queue is None:
            queue = tenants[item.tenant] = _TenantQueue()
        if not queue.items:
            queue.restart(min((other.served for other in self._active(priority)), default=queue.served))
        number = next(self._numbers)
        queue.add(item, number)
        self._places[id(item)] = (queue, number)
        self._counts[item.tenant] += 1
        if len(tenants) > MAX_TENANTS:
            self._classes[priority] = {name: kept for name, kept in tenants.items() if kept.items}

    def _active(self, priority: int) -> Iterator[_TenantQueue[T]]:
        return (queue for queue in self._classes.get(priority, {}).values() if queue.items)

    def _all_active(self) -> Iterator[_TenantQueue[T]]:
        return (queue for priority in self._classes for queue in self._active(priority))

    def remove(self, item: T) -> bool:
        """Remove an item; return False if it does not wait here."""
        place = self._places.pop(id(item), None)
        if place is None:
            return False
        queue, number = place
        queue.remove(number)
        self._counts[item.tenant] -= 1
        if not self._counts[item.tenant]:
            del self._counts[item.tenant]
        return True

    def pop(self, cost: float = 1.0) -> T | None:
        """Remove and return the next item and charge its tenant `cost`; return None if nothing waits."""
        for priority in sorted(self._classes):
            queue = min(self._active(priority), key=lambda queue: queue.served, default=None)
            if queue is not None:
                item = queue.head()
                self.remove(item)
                queue.charge(cost)
                return item
            # Nothing of this priority waits: its tenants start again as equals.
            del self._classes[priority]
        return None

    def heads(self) -> list[T]:
        """Return the next item of each tenant of each priority."""
        return [queue.head() for queue in self._all_active()]

    def count(self, tenant: str) -> int:
        """Return how many items of a tenant wait."""
        return self._counts[tenant]

    @property
    def tenants(self) -> int:
        """How many tenants have items that wait."""
        return len(self._counts)

    def charge(self, tenant: str, priority: int, cost: float) -> None:
        """Correct what a tenant was charged by `cost`, which may be negative."""
        if (queue := self._classes.get(priority, {}).get(tenant)) is not None:
            queue.charge(cost)

    def earliest_deadline_s(self) -> float:
        """Return the earliest deadline of all items; infinity if nothing waits."""
        return min((queue.head().deadline_s for queue in self._all_active()), default=math.inf)

    def ahead(self, tenant: str, priority: int) -> int:
        """Return how many items would be served before a new one with the latest deadline of its tenant."""
        own = self._classes.get(priority, {}).get(tenant)
        own_count = len(own.items) if own is not None else 0
        before = sum(
            len(queue.items) for other in self._classes if other < priority for queue in self._active(other)
        )
        # Before the new item, each other tenant of its priority is served as often as its tenant, plus once.
        others = (
            min(len(queue.items), own_count + 1) for queue in self._active(priority) if queue is not own
        )
        return before + own_count + sum(others)


class _TenantQueue(Generic[T]):
    """One tenant's items of one priority, each with a number in the order of arrival."""

    __slots__ = ("_heap", "items", "served")

    def __init__(self) -> None:
        self.items: dict[int, T] = {}
        # Deadlines and numbers; the entry of a removed item stays until it reaches the top.
        self._heap: list[tuple[float, int]] = []
        self.served = 0.0

    def restart(self, served: float) -> None:
        """Wait again after being idle."""
        self._heap.clear()
        self.served = max(self.served, served)

    def add(self, item: T, number: int) -> None:
        self.items[number] = item
        heapq.heappush(self._heap, (item.deadline_s, number))

    def remove(self, number: int) -> None:
        del self.items[number]
        if len(self._heap) > 2 * len(self.items) + MAX_REMOVED:
            self._heap = [entry for entry in self._heap if entry[1] in self.items]
            heapq.heapify(self._heap)

    def head(self) -> T:
        """Return the next item; something must wait."""
        while self._heap[0][1] not in self.items:
            heapq.heappop(self._heap)
        return self.items[self._heap[0][1]]

    def charge(self, cost: float) -> None:
        self.served += cost

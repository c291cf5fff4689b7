"""Orders waiting items: first by priority, then by their tenants' served cost, then by deadline.

Tenants share as with the virtual token counter (Sheng et al., OSDI '24). Each tenant has a counter of the cost of its
served items. Among the tenants with waiting items, the tenant with the smallest counter is next. When an idle tenant
returns, its counter is raised to the smallest counter of the other tenants, so that its idle time gives it no
advantage.

Calls that wait for workers (`runtime/calls/batching`), sequences of a language model (`handlers/language_model`) and webhook deliveries
(`runtime/jobs/stored`) have this order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """The attributes of an item that the fair queue reads."""

    tenant: str
    priority: int
    deadline_s: float


T = TypeVar("T", bound=Waiting)

# A priority that is served before the priorities of callers, which start at 1.
FIRST = 0
# If a priority has more tenants than this, its idle tenants are forgotten.
MAX_TENANTS = 1024
# A tenant's heap is rebuilt when it has more than 2 n + MAX_REMOVED entries, where n is the number of the
# tenant's waiting items. The other entries belong to removed items.
MAX_REMOVED = 64


class FairQueue(Generic[T]):
    """Waiting items in the order described above. An item is in the queue at most once."""

    def __init__(self) -> None:
        self._classes: dict[int, dict[str, _TenantQueue[T]]] = {}
        self._places: dict[int, tuple[_TenantQueue[T], int]] = {}
        self._counts: Counter[str] = Counter()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no particular order."""
        return (queue.items[number] for queue, number in list(self._places.values()))

    def add(self, item: T, *, first: bool = False) -> None:
        """Add an item. If `first`, it is served before the items of all priorities of callers."""
        priority = FIRST if first else item.priority
        tenants = self._classes.setdefault(priority, {})
        if (queue := tenants.get(item.tenant)) is None:
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
        """Yield the queues of a priority that have waiting items, one queue for each tenant."""
        return (queue for queue in self._classes.get(priority, {}).values() if queue.items)

    def remove(self, item: T) -> bool:
        """Remove an item. Return False if it is not in the queue."""
        queue, number = self._places.pop(id(item), (None, 0))
        if queue is None:
            return False
        queue.remove(number)
        self._counts[item.tenant] -= 1
        if not self._counts[item.tenant]:
            del self._counts[item.tenant]
        return True

    def first(self) -> T | None:
        """Return the next item, and leave it in the queue. Return None if the queue is empty."""
        queue = next(filter(None, map(self._least_served, sorted(self._classes))), None)
        return queue.head() if queue is not None else None

    def pop(self, cost: float = 1.0) -> T | None:
        """Remove and return the next item, and charge its tenant `cost`. Return None if the queue is empty."""
        for priority in sorted(self._classes):
            if (queue := self._least_served(priority)) is not None:
                item = queue.head()
                self.remove(item)
                queue.charge(cost)
                return item
            # No item of this priority waits. Forget its tenants: they start again with equal counters.
            del self._classes[priority]
        return None

    def _least_served(self, priority: int) -> _TenantQueue[T] | None:
        """Return the queue of the least served tenant of a priority; None if no item of this priority waits."""
        return min(self._active(priority), key=lambda queue: queue.served, default=None)

    def heads(self) -> list[T]:
        """For each priority and tenant, return the item that is served next."""
        return [queue.head() for priority in self._classes for queue in self._active(priority)]

    def count(self, tenant: str) -> int:
        """Return the number of waiting items of a tenant, of all priorities."""
        return self._counts[tenant]

    @property
    def tenants(self) -> int:
        """The number of tenants that have waiting items."""
        return len(self._counts)

    def served(self, tenant: str, priority: int) -> float:
        """Return the served cost of a tenant in a priority; 0 if it is not known."""
        queue = self._classes.get(priority, {}).get(tenant)
        return queue.served if queue is not None else 0.0

    def charge(self, tenant: str, priority: int, cost: float) -> None:
        """Add `cost`, which may be negative, to the served cost of a tenant in a priority."""
        if (queue := self._classes.get(priority, {}).get(tenant)) is not None:
            queue.charge(cost)

    def earliest_deadline_s(self) -> float:
        """Return the earliest deadline of all items; infinity if the queue is empty."""
        return min((item.deadline_s for item in self.heads()), default=math.inf)

    def ahead(self, tenant: str, priority: int) -> int:
        """Estimate how many items are served before a new item, which is the last item of its tenant."""
        own = self._classes.get(priority, {}).get(tenant)
        own_count = len(own.items) if own is not None else 0
        more_urgent = (queue for other in self._classes if other < priority for queue in self._active(other))
        rivals = (queue for queue in self._active(priority) if queue is not own)
        # The new item is number own_count + 1 of its tenant. If all items cost the same, another tenant is
        # served at most own_count + 1 items before it.
        fair = sum(min(len(queue.items), own_count + 1) for queue in rivals)
        return sum(len(queue.items) for queue in more_urgent) + own_count + fair

    def own_ahead(self, item: T) -> int | None:
        """Return how many items of the item's own tenant are served before it. Return None if it is not in the queue.

        The answer tells nothing of other tenants.
        """
        if (place := self._places.get(id(item))) is None:
            return None
        own, number = place
        found = 0
        for priority in sorted(self._classes):
            queue = self._classes[priority].get(item.tenant)
            if queue is own:
                return found + own.before(item, number)
            found += len(queue.items) if queue is not None else 0
        return found


@dataclass(eq=False, slots=True)
class _TenantQueue(Generic[T]):
    """One tenant's waiting items of one priority. Each item has a number. Later items have larger numbers."""

    items: dict[int, T] = field(default_factory=dict)
    # (deadline, number) of each item. The entry of a removed item stays until it is at the top of the heap.
    _heap: list[tuple[float, int]] = field(default_factory=list)
    served: float = 0.0
    """The tenant's counter: the total cost of its served items."""

    def restart(self, served: float) -> None:
        """Prepare the empty queue for a new item: raise the counter to `served`, if it is lower."""
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
        """Return the next item. The queue must not be empty."""
        while self._heap[0][1] not in self.items:
            heapq.heappop(self._heap)
        return self.items[self._heap[0][1]]

    def before(self, item: T, number: int) -> int:
        """Return how many items are served before the item with this number."""
        return sum((other.deadline_s, one) < (item.deadline_s, number) for one, other in self.items.items())

    def charge(self, cost: float) -> None:
        self.served += cost

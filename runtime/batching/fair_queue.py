"""The turns: a queue in order of priority, then in fair turns between tenants, then of deadlines.

Fair by served cost (the virtual token counter of Sheng et al., OSDI 2024): of the tenants that wait, the one that was
served least is next. Who comes back from being idle starts at the least of the others: idleness earns no credit.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What is asked of an item."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int: ...
    @property
    def deadline_s(self) -> float: ...


T = TypeVar("T", bound=Waiting)

# Before the priority of any caller, which begin at 1.
FIRST = 0
# More tenants than this are not remembered while they are idle.
MAX_IDLE = 1024
# So many entries of items that left may stay in a heap before it is swept.
MAX_LEFT = 64


class FairQueue(Generic[T]):
    """Items wait here once at a time each."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class[T]] = {}
        self._entries: dict[int, _Entry[T]] = {}
        self._held: dict[str, int] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[T]:
        """All that wait, in no order."""
        return (entry.item for entry in list(self._entries.values()) if entry.item is not None)

    def add(self, item: T, *, first: bool = False) -> None:
        """Takes an item in, or back in: what has the same deadline goes in the order in which it came.

        `first` goes before every priority.
        """
        priority = FIRST if first else item.priority
        entry = _Entry(item.deadline_s, next(self._numbers), priority, item)
        self._entries[id(item)] = entry
        kind = self._classes.get(priority)
        if kind is None:
            kind = self._classes[priority] = _Class()
        kind.add(item.tenant, entry)
        self._held[item.tenant] = self.held(item.tenant) + 1

    def drop(self, item: T) -> bool:
        """Takes an item out, wherever it stands; False if it does not wait here."""
        entry = self._entries.pop(id(item), None)
        if entry is None:
            return False
        entry.item = None
        self._classes[entry.priority].leave(item.tenant)
        self._leave(item)
        return True

    def take(self, cost: float = 1.0) -> T | None:
        """The next item, whose tenant is charged `cost` for it; None if nothing waits."""
        for priority in sorted(self._classes):
            kind = self._classes[priority]
            if kind.waiting:
                item = kind.take(cost)
                del self._entries[id(item)]
                self._leave(item)
                return item
            del self._classes[priority]  # nobody of this class waits: its tenants start anew, all equal
        return None

    def _leave(self, item: T) -> None:
        if left := self._held[item.tenant] - 1:
            self._held[item.tenant] = left
        else:
            del self._held[item.tenant]

    def heads(self) -> list[T]:
        """Of each turn the item that is its next."""
        return [item for kind in self._classes.values() if kind.waiting for item in kind.heads()]

    def held(self, tenant: str) -> int:
        """How many of a tenant's items wait."""
        return self._held.get(tenant, 0)

    @property
    def tenants(self) -> int:
        """How many tenants have something waiting."""
        return len(self._held)

    def charge(self, tenant: str, priority: int, cost: float) -> None:
        """What was served cost more than was charged for it, or less."""
        if (kind := self._classes.get(priority)) is not None:
            kind.charge(tenant, cost)

    def urgent_s(self) -> float:
        """The earliest deadline of all that wait; infinity if nothing does."""
        return min((kind.urgent_s() for kind in self._classes.values() if kind.waiting), default=math.inf)

    def ahead(self, tenant: str, priority: int) -> int:
        """How many would be served before one that `tenant` added now, if its deadline were its tenant's latest."""
        count = sum(kind.waiting for other, kind in self._classes.items() if other < priority)
        kind = self._classes.get(priority)
        return count + (kind.ahead(tenant) if kind is not None else 0)


class _Entry(Generic[T]):
    __slots__ = ("deadline_s", "item", "number", "priority")

    def __init__(self, deadline_s: float, number: int, priority: int, item: T) -> None:
        self.deadline_s = deadline_s
        self.number = number
        self.priority = priority
        self.item: T | None = item

    def __lt__(self, other: _Entry[T]) -> bool:
        return (self.deadline_s, self.number) < (other.deadline_s, other.number)


class _Lane(Generic[T]):
    """One tenant's items."""

    __slots__ = ("heap", "served", "waiting")

    def __init__(self, served: float) -> None:
        self.heap: list[_Entry[T]] = []
        self.served = served
        self.waiting = 0

    def head(self) -> _Entry[T]:
        """Only while something waits."""
        while self.heap[0].item is None:
            heapq.heappop(self.heap)
        return self.heap[0]


class _Class(Generic[T]):
    """The items of one priority."""

    __slots__ = ("_lanes", "waiting")

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane[T]] = {}
        self.waiting = 0

    def add(self, tenant: str, entry: _Entry[T]) -> None:
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = _Lane(0.0)
        if not lane.waiting:
            lane.heap.clear()
            least = min(
                (other.served for other in self._lanes.values() if other.waiting), default=lane.served
            )
            lane.served = max(lane.served, least)
        lane.waiting += 1
        self.waiting += 1
        heapq.heappush(lane.heap, entry)
        if len(self._lanes) > MAX_IDLE:
            self._lanes = {name: lane for name, lane in self._lanes.items() if lane.waiting}

    def leave(self, tenant: str) -> None:
        lane = self._lanes[tenant]
        lane.waiting -= 1
        self.waiting -= 1
        if len(lane.heap) > 2 * lane.waiting + MAX_LEFT:
            lane.heap = [entry for entry in lane.heap if entry.item is not None]
            heapq.heapify(lane.heap)

    def take(self, cost: float) -> T:
        """Only while something waits."""
        lane = min((lane for lane in self._lanes.values() if lane.waiting), key=lambda lane: lane.served)
        while (item := heapq.heappop(lane.heap).item) is None:
            pass
        lane.waiting -= 1
        self.waiting -= 1
        lane.served += cost
        return item

    def heads(self) -> list[T]:
        entries = (lane.head() for lane in self._lanes.values() if lane.waiting)
        return [entry.item for entry in entries if entry.item is not None]

    def urgent_s(self) -> float:
        return min(lane.head().deadline_s for lane in self._lanes.values() if lane.waiting)

    def charge(self, tenant: str, cost: float) -> None:
        if (lane := self._lanes.get(tenant)) is not None:
            lane.served += cost

    def ahead(self, tenant: str) -> int:
        own = self._lanes.get(tenant)
        before = own.waiting if own is not None else 0
        # Turn by turn: before its turn comes, each of the others has at most as many turns as it has.
        others = (lane.waiting for lane in self._lanes.values() if lane is not own and lane.waiting)
        return before + sum(min(waiting, before + 1) for waiting in others)

"""Compares the fair queue with a model that looks at every item each time."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pilotflame.fair_queue import FairQueue


@dataclass(eq=False)
class Item:
    tenant: str
    priority: int
    deadline_s: float


items = st.builds(Item, st.sampled_from("abcd"), st.integers(1, 3), st.integers(0, 5).map(float))


class Beside(RuleBasedStateMachine):
    """Compares FairQueue with a simple model: no item is lost or returned twice. `pop` chooses the most urgent priority, then the tenant
    that was served least, then the earliest deadline.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Item] = FairQueue()
        # The items in the order of their arrival.
        self.waiting: list[Item] = []
        self.first: set[int] = set()
        self.served: dict[tuple[int, str], float] = {}

    def priority(self, item: Item) -> int:
        return 0 if id(item) in self.first else item.priority

    def rivals(self, priority: int) -> list[Item]:
        return [item for item in self.waiting if self.priority(item) == priority]

    @rule(item=items, first=st.booleans())
    def add(self, item: Item, first: bool) -> None:
        priority = 0 if first else item.priority
        rivals = self.rivals(priority)
        # A tenant without waiting items starts with the least service of its rivals: idleness earns no
        # credit.
        if all(rival.tenant != item.tenant for rival in rivals):
            key = (priority, item.tenant)
            least = min((self.served[priority, rival.tenant] for rival in rivals), default=0.0)
            self.served[key] = max(self.served.get(key, 0.0), least)
        self.queue.add(item, first=first)
        self.waiting.append(item)
        if first:
            self.first.add(id(item))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(item)
        assert not self.queue.remove(item)
        self.waiting.remove(item)

    @rule(cost=st.integers(1, 3))
    def pop(self, cost: int) -> None:
        item = self.queue.pop(float(cost))
        if item is None:
            assert not self.waiting
            self.served.clear()
            return
        priority = min(map(self.priority, self.waiting))
        for key in [key for key in self.served if key[0] < priority]:
            # Tenants of an empty priority start again as equals.
            del self.served[key]
        rivals = self.rivals(priority)
        assert item in rivals
        least = min(self.served[priority, rival.tenant] for rival in rivals)
        assert self.served[priority, item.tenant] == least
        own = [rival for rival in rivals if rival.tenant == item.tenant]
        # `min` returns the first of several items with equal deadlines, which was added first.
        assert item is min(own, key=lambda rival: rival.deadline_s)
        self.served[priority, item.tenant] += cost
        self.waiting.remove(item)

    @rule(tenant=st.sampled_from("abcd"), priority=st.integers(1, 3), cost=st.integers(-1, 5))
    def charge(self, tenant: str, priority: int, cost: int) -> None:
        self.queue.charge(tenant, priority, float(cost))
        if (priority, tenant) in self.served:
            self.served[priority, tenant] += cost

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert set(map(id, self.queue)) == set(map(id, self.waiting))
        assert self.queue.earliest_deadline_s() == min(
            (item.deadline_s for item in self.waiting), default=math.inf
        )
        held = Counter(item.tenant for item in self.waiting)
        assert self.queue.tenants == len(held)
        assert all(self.queue.count(tenant) == held[tenant] for tenant in "abcd")
        heads: dict[tuple[int, str], Item] = {}
        for item in sorted(self.waiting, key=lambda item: item.deadline_s):
            heads.setdefault((self.priority(item), item.tenant), item)
        assert set(map(id, self.queue.heads())) == set(map(id, heads.values()))


TestBeside = Beside.TestCase


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.1, 5.0)), min_size=10, max_size=60))
def test_two_that_always_wait_are_served_within_an_items_cost_of_each_other(
    costs: list[tuple[str, float]],
) -> None:
    queue: FairQueue[Item] = FairQueue()
    served = {"a": 0.0, "b": 0.0}
    for tenant in ("a", "b"):
        for _ in costs:
            queue.add(Item(tenant, 3, 1.0))
    for _, cost in costs:
        item = queue.pop(cost)
        assert item is not None
        served[item.tenant] += cost
        assert abs(served["a"] - served["b"]) <= 5.0


def test_an_idle_tenant_gains_no_credit() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(30):
        queue.add(Item("busy", 3, 1.0))
    queue.add(Item("back", 3, 1.0))
    assert "back" in {queue.pop().tenant for _ in range(2)}  # type: ignore[union-attr]
    for _ in range(18):
        queue.pop()
    for _ in range(10):
        queue.add(Item("back", 3, 1.0))
    order = [queue.pop().tenant for _ in range(10)]  # type: ignore[union-attr]
    assert order.count("back") == 5


def test_a_tenant_that_returns_is_still_behind_those_who_were_served_less() -> None:
    queue: FairQueue[Item] = FairQueue()
    for tenant in "abbbb":
        queue.add(Item(tenant, 3, 1.0))
    assert queue.pop(3.0).tenant == "a"  # type: ignore[union-attr]
    queue.add(Item("b", 3, 1.0))
    queue.add(Item("a", 3, 1.0))
    assert [queue.pop().tenant for _ in range(4)] == ["b", "b", "b", "a"]  # type: ignore[union-attr]


@given(st.lists(items, max_size=30), st.sampled_from("abcd"), st.integers(1, 3))
def test_no_more_are_ahead_than_are_served_before_it(there: list[Item], tenant: str, priority: int) -> None:
    queue: FairQueue[Item] = FairQueue()
    for item in there:
        queue.add(item)
    ahead = queue.ahead(tenant, priority)
    last = Item(tenant, priority, 99.0)
    queue.add(last)
    before = 0
    while queue.pop() is not last:
        before += 1
    assert ahead - len({item.tenant for item in there}) <= before <= ahead


def test_those_that_stay_keep_their_order_when_hundreds_before_and_after_them_leave() -> None:
    queue: FairQueue[Item] = FairQueue()
    there = [Item("a", 3, float(number * 37 % 500)) for number in range(500)]
    for item in there:
        queue.add(item)
    staying = there[::50]
    for item in there:
        if item not in staying:
            assert queue.remove(item)
    order = [queue.pop() for _ in staying]
    assert order == sorted(staying, key=lambda item: item.deadline_s)
    assert queue.pop() is None


def test_of_a_rival_with_more_items_as_many_are_ahead_as_will_be_served_first() -> None:
    queue: FairQueue[Item] = FairQueue()
    for _ in range(9):
        queue.add(Item("rival", 3, 1.0))
    for _ in range(3):
        queue.add(Item("own", 3, 1.0))
    # Three items of its own, and the rival's first four: the rival was first, and the tenants alternate.
    assert queue.ahead("own", 3) == 3 + 4
    assert queue.ahead("another", 3) == 1 + 1
    assert queue.ahead("own", 2) == 0
    assert queue.ahead("own", 4) == 12


@given(st.lists(st.tuples(items, st.booleans()), min_size=1, max_size=12), st.data())
def test_a_tenants_own_items_ahead_are_served_before_an_item(
    there: list[tuple[Item, bool]], data: st.DataObject
) -> None:
    queue: FairQueue[Item] = FairQueue()
    for item, first in there:
        queue.add(item, first=first)
    wanted = data.draw(st.sampled_from([item for item, _ in there]))
    ahead = queue.own_ahead(wanted)
    served = []
    while (item := queue.pop()) is not None:
        served.append(item)
    before = served[: served.index(wanted)]
    assert ahead == sum(item.tenant == wanted.tenant for item in before)
    assert queue.own_ahead(wanted) is None

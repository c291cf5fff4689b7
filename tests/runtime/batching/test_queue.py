"""The queue: whatever happens, every item is taken, refused or dropped once; and who is refused is told when to come."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pilotflame.errors import Overloaded, QueueFull
from pilotflame.runtime.batching.latency_curve import LatencyCurve, Point
from pilotflame.runtime.batching.queue import MAX_RETRY_S, MIN_RETRY_S, Lanes, Queue

BUSY_S = 0.01


@dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 3
    deadline_s: float = math.inf
    body: bytes = b""
    patient: bool = False
    company: int = 0
    timeout_s: float = math.inf


def curve() -> LatencyCurve:
    return LatencyCurve(Point(n, 0.02 + n * 0.001, 0.02 + n * 0.001) for n in (1, 2, 4, 8))


def queue_of(limit: int = 4, most: int = 100) -> Queue[Item]:
    return Queue("f", limit=limit, most=most, curve=curve())


def busy(now_s: float = 0.0) -> Lanes:
    return Lanes(1, now_s + BUSY_S)


class Fates(RuleBasedStateMachine):
    """One lane that is sometimes busy, and items of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue_of(most=12)
        self.now_s = 0.0
        self.waiting: list[Item] = []

    @rule(
        tenant=st.sampled_from("ab"), priority=st.integers(1, 3), timeout_s=st.sampled_from([0.01, 0.03, 0.1, 9.0]),
        body=st.sampled_from([b"x", b"y"]), patient=st.booleans(), company=st.integers(0, 3), free=st.booleans(),
    )  # fmt: skip
    def arrive(
        self, tenant: str, priority: int, timeout_s: float, body: bytes, patient: bool, company: int, free: bool
    ) -> None:  # fmt: skip
        item = Item(tenant, priority, self.now_s + timeout_s, body, patient, company)
        lanes = Lanes(1, self.now_s + (0 if free else BUSY_S))
        try:
            self.queue.admit(item, self.now_s, lanes)
        except QueueFull as error:
            assert len(self.waiting) >= 12
            self.told(error)
        except Overloaded as error:
            assert not patient
            assert self.waiting or not free  # what is free and idle refuses nobody
            self.told(error)
        else:
            self.waiting.append(item)

    def told(self, error: Overloaded | QueueFull) -> None:
        assert MIN_RETRY_S <= (error.details or {})["retry_after_s"] <= MAX_RETRY_S

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        assert self.queue.drop(item)
        self.waiting.remove(item)

    @rule(back=st.booleans(), ahead_s=st.sampled_from([0.0, 0.003]))
    def gather(self, back: bool, ahead_s: float) -> None:
        found = self.queue.next(self.now_s + ahead_s)
        if found.wait_until_s is not None:
            assert found.wait_until_s > self.now_s + ahead_s
            assert not found.taken
            assert not found.refused
            return
        assert len(found.taken) <= 4
        assert all(len(found.taken) <= item.company for item in found.taken if item.company)
        assert not any(item.patient for item in found.refused)
        assert bool(found.taken) or bool(found.refused) or not self.waiting
        for item in (*found.taken, *found.refused):
            self.waiting.remove(item)  # fails if it was there never, or twice
        for item in found.refused:
            self.told(self.queue.refusal(item, self.now_s, busy(self.now_s)))
        if back:
            for item in found.taken:
                self.queue.put_back(item)
                self.waiting.append(item)
        elif found.taken:
            for item in found.taken:
                self.queue.charge(item, 1.0)
            self.now_s += 0.02
            self.queue.ended(self.now_s, len(found.taken), float(len(found.taken)), 0.02)

    @rule(seconds=st.floats(0, 0.3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds_what_waits(self) -> None:
        assert set(map(id, self.queue)) == set(map(id, self.waiting))
        assert len(self.queue) == len(self.waiting) <= 24


TestFates = Fates.TestCase


def test_it_refuses_on_arrival_what_would_end_too_late_and_says_when_there_is_room() -> None:
    queue = queue_of()
    for _ in range(8):
        queue.admit(Item(), 0.0, busy())
    with pytest.raises(Overloaded) as caught:  # 0.01 rest + two groups of 0.024 + its own 0.021
        queue.admit(Item(deadline_s=0.078), 0.0, busy())
    assert (caught.value.details or {})["retry_after_s"] == pytest.approx(0.01 + 2 * 0.024)
    queue.admit(Item(deadline_s=0.08), 0.0, busy())
    queue.admit(Item(deadline_s=0.05, priority=1), 0.0, busy())  # before all others
    queue.admit(Item(deadline_s=0.0, patient=True), 0.0, busy())
    assert len(queue) == 11


def test_who_comes_again_as_told_is_served_first() -> None:
    queue = queue_of()
    waiting = [Item(body=str(number).encode()) for number in range(8)]
    for item in waiting:
        queue.admit(item, 0.0, busy())
    with pytest.raises(Overloaded) as caught:
        queue.admit(Item(deadline_s=0.05, body=b"me"), 0.0, busy())
    now_s = (caught.value.details or {})["retry_after_s"]
    with pytest.raises(Overloaded):
        queue.admit(Item(deadline_s=now_s + 0.05, body=b"another"), now_s, busy(now_s))
    again = Item(deadline_s=now_s + 0.05, body=b"me")
    queue.admit(again, now_s, busy(now_s))
    assert queue.next(now_s).taken[0] is again


def test_nobody_gets_to_the_front_by_being_refused_first() -> None:
    queue = queue_of()
    waiting = [Item("others", body=str(number).encode()) for number in range(8)]
    for item in waiting:
        queue.admit(item, 0.0, busy())
    with pytest.raises(Overloaded) as caught:
        queue.admit(Item("sly", deadline_s=0.001, body=b"me", timeout_s=0.001), 0.0, busy())
    now_s = (caught.value.details or {})["retry_after_s"]
    sly = [Item("sly", deadline_s=now_s + 600, body=b"me", timeout_s=600.0) for _ in range(4)]
    for item in sly:
        queue.admit(item, now_s, busy(now_s))
    assert queue.next(now_s).taken[0] is waiting[0]


def test_who_cannot_be_in_time_makes_room_for_those_who_can() -> None:
    queue = queue_of()
    late = Item(deadline_s=0.1)
    others = [Item(deadline_s=0.2) for _ in range(5)]
    for item in (late, *others):
        queue.admit(item, 0.0, busy())
    found = queue.next(0.09)
    assert found.refused == [late]
    assert found.taken == others[:4]


def test_who_would_be_too_late_is_told_before_its_turn_comes() -> None:
    queue = queue_of()
    first = [Item(priority=1) for _ in range(4)]
    behind = [Item(deadline_s=0.1), Item(deadline_s=0.1), Item(deadline_s=0.1), Item(deadline_s=9.0)]
    for item in (*first, *behind):
        queue.admit(item, 0.0, Lanes(2, BUSY_S))
    found = queue.next(0.09)
    assert found.taken == first
    assert found.refused == behind[:3]
    assert list(queue) == behind[3:]


def test_nobody_fills_the_queue_for_the_others() -> None:
    queue = queue_of(most=10)
    for _ in range(10):
        queue.admit(Item("greedy"), 0.0, busy())
    with pytest.raises(QueueFull):
        queue.admit(Item("greedy"), 0.0, busy())
    for _ in range(5):
        queue.admit(Item("small"), 0.0, busy())
    with pytest.raises(QueueFull):
        queue.admit(Item("small"), 0.0, busy())
    for number in range(5):
        queue.admit(Item(str(number)), 0.0, busy())
    with pytest.raises(QueueFull):
        queue.admit(Item("one more"), 0.0, busy())


def test_what_must_run_alone_does_and_pays_only_for_itself() -> None:
    queue = queue_of()
    alone = Item(tenant="a", company=1)
    queue.admit(Item(tenant="a", deadline_s=1.0), 0.0, busy())
    queue.admit(alone, 0.0, busy())
    queue.admit(Item(tenant="b", deadline_s=1.0), 0.0, busy())
    groups = []
    while len(queue):
        groups.append(queue.next(0.0).taken)
    assert [alone] in groups
    assert sorted(map(len, groups)) == [1, 2]


def test_what_is_refused_is_not_charged() -> None:
    queue = queue_of(limit=2)
    fine = Item("a", deadline_s=9.0)
    for item in (Item("a", deadline_s=0.1), Item("a", deadline_s=0.1), fine, Item("b"), Item("b")):
        queue.admit(item, 0.0, busy())
    found = queue.next(0.09)
    assert len(found.refused) == 2
    assert found.taken[0] is fine
    assert found.taken[1].tenant == "b"

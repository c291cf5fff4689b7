"""The queue: each item is run, refused or removed once. A refusal states when to retry. Admission predicts when an item ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from pilotflame.errors import Overloaded, QueueFull
from pilotflame.runtime.calls.batching.latency_curve import LatencyCurve, Point
from pilotflame.runtime.calls.batching.queue import MAX_RETRY_S, MIN_RETRY_S, Forecast, Queue, Slots
from pilotflame.runtime.ground.access.fair_share import SharedRoom

BUSY_S = 0.01


@dataclass(eq=False)
class Item:
    tenant: str = ""
    priority: int = 3
    deadline_s: float = math.inf
    body: bytes = b""
    patient: bool = False
    max_batch: int = 0
    timeout_s: float = math.inf
    first: bool = False


def curve() -> LatencyCurve:
    return LatencyCurve(Point(n, 0.02 + n * 0.001, 0.02 + n * 0.001) for n in (1, 2, 4, 8))


def queue_of(max_batch: int = 4, max_queue: int = 100) -> Queue[Item]:
    return Queue("f", max_batch=max_batch, max_queue=max_queue, curve=curve())


def busy(now_s: float = 0.0) -> Slots:
    return Slots(1, now_s + BUSY_S)


class Machine(RuleBasedStateMachine):
    """Compares the queue with a list of the waiting items. One slot, which is sometimes busy, runs items of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue_of(max_queue=12)
        self.now_s = 0.0
        self.waiting: list[Item] = []

    @rule(
        tenant=st.sampled_from("ab"), priority=st.integers(1, 3), timeout_s=st.sampled_from([0.01, 0.03, 0.1, 9.0]),
        body=st.sampled_from([b"x", b"y"]), patient=st.booleans(), max_batch=st.integers(0, 3), free=st.booleans(),
    )  # fmt: skip
    def arrive(
        self, tenant: str, priority: int, timeout_s: float, body: bytes, patient: bool, max_batch: int, free: bool
    ) -> None:  # fmt: skip
        item = Item(tenant, priority, self.now_s + timeout_s, body, patient, max_batch)
        slots = Slots(1, self.now_s + (0 if free else BUSY_S))
        try:
            self.queue.admit(item, self.now_s, slots)
        except QueueFull as error:
            assert len(self.waiting) >= 12
            self.told(error)
        except Overloaded as error:
            assert not patient
            # With a free slot and no waiting items, an item is never refused.
            assert self.waiting or not free
            self.told(error)
        else:
            self.waiting.append(item)

    def told(self, error: Overloaded | QueueFull) -> None:
        assert MIN_RETRY_S <= (error.details or {})["retry_after_s"] <= MAX_RETRY_S

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from(self.waiting))
        assert self.queue.remove(item)
        assert not self.queue.remove(item)
        self.waiting.remove(item)

    @rule(back=st.booleans(), ahead_s=st.sampled_from([0.0, 0.003]))
    def form_batch(self, back: bool, ahead_s: float) -> None:
        found = self.queue.next_batch(self.now_s + ahead_s)
        if found.wait_until_s is not None:
            assert found.wait_until_s > self.now_s + ahead_s
            assert not found.batch
            assert not found.refused
            return
        assert len(found.batch) <= 4
        assert all(len(found.batch) <= item.max_batch for item in found.batch if item.max_batch)
        assert not any(item.patient for item in found.refused)
        assert bool(found.batch) or bool(found.refused) or not self.waiting
        for item in (*found.batch, *found.refused):
            # `remove` raises ValueError if the item was not waiting, or has already left.
            self.waiting.remove(item)
        for item in found.refused:
            self.told(self.queue.refusal(item, self.now_s, busy(self.now_s)))
        if back:
            for item in found.batch:
                self.queue.requeue(item)
                self.waiting.append(item)
        elif found.batch:
            for item in found.batch:
                self.queue.charge(item, 1.0)
            self.now_s += 0.02
            self.queue.forecast.observe_batch(self.now_s, len(found.batch), float(len(found.batch)), 0.02)

    @rule(seconds=st.floats(0, 0.3))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @invariant()
    def holds_what_waits(self) -> None:
        assert set(map(id, self.queue)) == set(map(id, self.waiting))
        assert len(self.queue) == len(self.waiting) <= 24
        assert self.queue._bytes == sum(len(item.body) for item in self.waiting)
        assert self.queue._first == sum(item.first for item in self.waiting)


TestMachine = Machine.TestCase


def test_it_refuses_on_arrival_what_would_end_too_late_and_says_when_to_retry() -> None:
    queue = queue_of()
    for _ in range(8):
        queue.admit(Item(), 0.0, busy())
    # The item would end after 0.01 s for the running batch, two batches of 0.024 s, and 0.021 s for its own batch.
    with pytest.raises(Overloaded) as caught:
        queue.admit(Item(deadline_s=0.078), 0.0, busy())
    assert (caught.value.details or {})["retry_after_s"] == pytest.approx(0.01 + 2 * 0.024)
    queue.admit(Item(deadline_s=0.08), 0.0, busy())
    # This item runs before all others.
    queue.admit(Item(deadline_s=0.05, priority=1), 0.0, busy())
    queue.admit(Item(deadline_s=0.0, patient=True), 0.0, busy())
    assert len(queue) == 11


def test_what_a_busy_worker_would_end_too_late_is_refused_and_a_free_one_tries_it() -> None:
    late = Item(deadline_s=0.02)
    with pytest.raises(Overloaded):
        queue_of().admit(late, 0.0, busy())
    queue_of().admit(late, 0.0, Slots(1, 0.0))


def test_a_time_limit_that_no_call_meets_is_named() -> None:
    """A retry would not help, and neither would more workers."""
    queue = queue_of()
    queue.admit(Item(), 0.0, busy())
    with pytest.raises(Overloaded, match=r"takes 0\.021 s, longer than its time limit of 0\.005 s") as caught:
        queue.admit(Item(deadline_s=0.005, timeout_s=0.005), 0.0, busy())
    assert "X-Request-Timeout" in caught.value.remedy
    with pytest.raises(Overloaded, match="has 1 invocation waiting"):
        queue.admit(Item(deadline_s=0.025, timeout_s=0.025), 0.0, busy())


def test_a_retry_when_told_is_served_first() -> None:
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
    assert queue.next_batch(now_s).batch[0] is again


def test_a_reserved_item_is_charged_where_it_was_served() -> None:
    queue = queue_of()
    for number in range(8):
        queue.admit(Item("slow", body=str(number).encode()), 0.0, busy())
    with pytest.raises(Overloaded) as caught:
        queue.admit(Item("slow", deadline_s=0.05, body=b"me"), 0.0, busy())
    now_s = (caught.value.details or {})["retry_after_s"]
    again = Item("slow", deadline_s=now_s + 0.05, body=b"me")
    queue.admit(again, now_s, busy(now_s))
    queue.requeue(Item("other"))
    assert queue.next_batch(now_s).batch[0] is again
    queue.charge(again, 1000.0)
    # The real cost is charged at the priority of reserved items, not at the item's own. So the tenants still alternate.
    assert [item.tenant for item in queue.next_batch(now_s).batch].count("slow") >= 2


def test_waiting_bodies_are_limited_in_bytes() -> None:
    queue: Queue[Item] = Queue("f", max_batch=1, max_queue=100, max_bytes=3 << 20, curve=curve())
    waiting = [Item("a", body=bytes(1 << 20)) for _ in range(3)]
    for item in waiting:
        queue.admit(item, 0.0, busy())
    with pytest.raises(QueueFull, match="3 MiB of bodies waiting; its limit is 3 MiB") as caught:
        queue.admit(Item("a", body=b"x"), 0.0, Slots(1, 0.0123456))
    # The time until the worker is free and has run the three items one after the other, in whole milliseconds.
    assert caught.value.details == {"retry_after_s": 0.075}
    # The items of another tenant may use its own share of the bytes.
    queue.admit(Item("b", body=b"x"), 0.0, busy())
    assert queue.next_batch(1.0).batch
    assert queue.remove(waiting[2])
    queue.admit(Item("a", body=bytes(9 << 20)), 0.0, busy())
    with pytest.raises(QueueFull):
        queue.admit(Item("c"), 0.0, busy())


def test_a_short_deadline_earns_no_reservation_for_a_long_one() -> None:
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
    assert queue.next_batch(now_s).batch[0] is waiting[0]


def test_late_items_make_room_for_those_that_can_be_on_time() -> None:
    queue = queue_of()
    late = Item(deadline_s=0.1)
    others = [Item(deadline_s=0.2) for _ in range(5)]
    for item in (late, *others):
        queue.admit(item, 0.0, busy())
    found = queue.next_batch(0.09)
    assert found.refused == [late]
    assert found.batch == others[:4]


@pytest.mark.parametrize(("others", "late"), [(0, False), (1, False), (3, True), (9, True)])
def test_an_item_is_late_by_the_batch_that_it_would_run_in(others: int, late: bool) -> None:
    queue, item = queue_of(), Item(deadline_s=10.023)
    for one in (item, *(Item() for _ in range(others))):
        queue.requeue(one)
    assert queue.next_batch(10.0).refused == [item] * late


def test_items_that_would_be_late_are_refused_before_their_turn() -> None:
    queue = queue_of()
    first = [Item(priority=1) for _ in range(4)]
    behind = [Item(deadline_s=0.1), Item(deadline_s=0.1), Item(deadline_s=0.1), Item(deadline_s=9.0)]
    for item in (*first, *behind):
        queue.admit(item, 0.0, Slots(2, BUSY_S))
    found = queue.next_batch(0.09)
    assert found.batch == first
    assert found.refused == behind[:3]
    assert list(queue) == behind[3:]


def test_no_tenant_fills_the_queue_for_the_others() -> None:
    queue = queue_of(max_queue=10)
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


def test_an_item_that_must_run_alone_pays_only_for_itself() -> None:
    queue = queue_of()
    alone = Item(tenant="a", max_batch=1)
    queue.admit(Item(tenant="a", deadline_s=1.0), 0.0, busy())
    queue.admit(alone, 0.0, busy())
    queue.admit(Item(tenant="b", deadline_s=1.0), 0.0, busy())
    groups = []
    while len(queue):
        groups.append(queue.next_batch(0.0).batch)
    assert [alone] in groups
    assert sorted(map(len, groups)) == [1, 2]


def test_refused_items_are_not_charged() -> None:
    queue = queue_of(max_batch=2)
    fine = Item("a", deadline_s=9.0)
    for item in (Item("a", deadline_s=0.1), Item("a", deadline_s=0.1), fine, Item("b"), Item("b")):
        queue.admit(item, 0.0, busy())
    found = queue.next_batch(0.09)
    assert len(found.refused) == 2
    assert found.batch[0] is fine
    assert found.batch[1].tenant == "b"


def test_it_counts_what_it_admits_and_how_often_the_last_one_leaves() -> None:
    queue = queue_of()
    first, second, late = Item(), Item(), Item(deadline_s=0.001)
    queue.admit(first, 0.0, busy())
    queue.admit(second, 0.0, busy())
    with pytest.raises(Overloaded):
        queue.admit(late, 0.0, busy())
    queue.remove(first)
    assert (queue.admitted, queue.emptied) == (2, 0)
    queue.remove(second)
    assert (queue.admitted, queue.emptied) == (2, 1)
    queue.requeue(first)
    assert queue.next_batch(0.0).batch == [first]
    assert (queue.admitted, queue.emptied) == (2, 2)


def test_an_item_whose_deadline_is_near_does_not_wait_for_a_larger_batch() -> None:
    """Callers return 5 ms after each batch. The next batch waits for them, unless an item would then be late."""
    starts_s = []
    for rest_s in (9.0, 0.024):
        queue = queue_of(max_batch=2)
        for end_s in (100.0, 101.0, 102.0):
            queue.forecast.observe_batch(end_s, 2, 2.0, 0.022)
            for _ in range(2):
                queue.admit(Item(), end_s + 0.005, Slots(1, end_s))
            queue.next_batch(end_s + 0.5)
        queue.forecast.observe_batch(103.0, 2, 2.0, 0.022)
        queue.admit(Item(deadline_s=103.001 + rest_s), 103.001, Slots(1, 103.0))
        starts_s.append(queue.next_batch(103.001).wait_until_s)
    assert starts_s[0] == pytest.approx(103.005, abs=0.002)
    assert starts_s[1] is None


# -- admission

CURVE = LatencyCurve(Point(n, 0.02 + n * 0.001, 0.03 + n * 0.001) for n in (1, 2, 4, 8))


def finish_s(ahead: int, max_batch: int, slots: Slots, now_s: float, curve: LatencyCurve) -> float:
    return Forecast(curve, max_batch).finish_s(ahead, now_s, slots)


def drained_s(waiting: int, max_batch: int, slots: Slots, now_s: float, curve: LatencyCurve) -> float:
    return Forecast(curve, max_batch).drained_s(waiting, now_s, slots)


batches, slots_of = st.integers(1, 8), st.builds(Slots, st.integers(1, 8), st.floats(9, 11))


def test_it_ends_after_what_runs_the_full_batches_before_it_and_its_own() -> None:
    one = Slots(1, 10.01)
    assert finish_s(0, 8, one, 10.0, CURVE) == pytest.approx(10.01 + 0.021)
    assert finish_s(19, 8, one, 10.0, CURVE) == pytest.approx(10.01 + 2 * 0.028 + 0.024)
    assert finish_s(19, 8, Slots(2, 10.01), 10.0, CURVE) == pytest.approx(10.01 + 0.028 + 0.024)
    assert finish_s(0, 8, Slots(1, 0.0), 10.0, CURVE) == pytest.approx(10.0 + 0.021)
    assert finish_s(0, 8, Slots(1, math.inf), 10.0, CURVE) == math.inf


@given(st.integers(0, 200), batches, slots_of)
def test_more_ahead_is_never_sooner_and_more_slots_never_later_by_more_than_a_batch(
    ahead: int, max_batch: int, slots: Slots
) -> None:
    end_s, full_s = finish_s(ahead, max_batch, slots, 10.0, CURVE), CURVE.typical(max_batch)
    assert end_s >= max(10.0, slots.free_at_s) + CURVE.typical(1)
    further = finish_s(ahead + max_batch * slots.count, max_batch, slots, 10.0, CURVE)
    assert further == pytest.approx(end_s + full_s)
    assert finish_s(ahead, max_batch, Slots(slots.count + 1, slots.free_at_s), 10.0, CURVE) <= end_s + full_s


@given(st.integers(0, 250), st.integers(0, 100), batches, slots_of)
def test_it_is_drained_no_sooner_with_more_that_waits(
    waiting: int, more: int, max_batch: int, slots: Slots
) -> None:
    free_s = max(10.0, slots.free_at_s)
    assert drained_s(waiting, max_batch, slots, 10.0, CURVE) >= 10.0
    assert drained_s(waiting, max_batch, slots, 10.0, CURVE) <= drained_s(
        waiting + more, max_batch, slots, 10.0, CURVE
    )
    assert drained_s(0, max_batch, slots, 10.0, CURVE) == free_s
    full = drained_s(3 * max_batch * slots.count, max_batch, slots, 10.0, CURVE)
    assert full == pytest.approx(free_s + 3 * CURVE.typical(max_batch))


def test_the_bodies_of_all_queues_share_a_room() -> None:
    """An owner with many functions leaves bytes for other owners. A call frees its bytes when it leaves the queue."""
    room = SharedRoom(1000)
    queues = [Queue[Item](name, max_batch=1, max_queue=100, curve=curve(), room=room) for name in "fgh"]
    for queue in queues[:2]:
        queue.admit(Item("greedy", body=b"x" * 400), 0.0, busy())
    with pytest.raises(QueueFull, match="queues of all functions"):
        queues[2].admit(Item("greedy", body=b"x" * 150), 0.0, busy())
    queues[2].admit(Item("other", body=b"x" * 100), 0.0, busy())
    assert room.total == 900
    for queue in queues:
        while queue.next_batch(0.0).batch:
            pass
    assert room.total == 0

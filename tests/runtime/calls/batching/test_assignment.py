"""Assignment:
free workers get batches first, busy workers get full batches shortly before they are free, and no timer is set again and again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import given
from pilotflame.runtime.calls.batching.assignment import (
    AHEAD_S,
    LATE_S,
    SHORT_S,
    WAKE_S,
    assign,
    choose,
    is_soonest,
    late_after_s,
)
from pilotflame.runtime.calls.batching.latency_curve import LatencyCurve, Point
from pilotflame.runtime.calls.batching.outstanding import Outstanding
from pilotflame.runtime.calls.batching.prefetch import PREFETCH_S
from pilotflame.runtime.calls.batching.queue import Queue, Slots
from pilotflame.runtime.calls.batching.simulator import SimulatedAttempt, SimulatedCall, SimulatedWorker

RUN_S = 0.02


def busy_until(end_s: float) -> SimulatedWorker:
    worker = SimulatedWorker(1)
    worker.outstanding.add_batch([SimulatedAttempt(SimulatedCall(0.0))], end_s - RUN_S)
    return worker


def queue_of(count: int) -> Queue[SimulatedAttempt]:
    curve = LatencyCurve([Point(1, RUN_S, RUN_S)])
    queue: Queue[SimulatedAttempt] = Queue("f", max_batch=4, max_queue=99, curve=curve)
    for _ in range(count):
        queue.admit(SimulatedAttempt(SimulatedCall(0.0)), 0.0, Slots(1, 0.0))
    return queue


def carry_out(
    queue: Queue[SimulatedAttempt], workers: list[SimulatedWorker], now_s: float
) -> list[tuple[int, float | None]]:
    """Carry out the steps of an assignment. For each step, return how many calls were sent, and until when to wait."""

    def pick() -> SimulatedWorker | None:
        return next((one for one in workers if one.outstanding.load < one.outstanding.slots), None)

    steps = []
    for worker, selection in assign(queue, pick, workers, now_s):
        if selection.batch:
            assert worker is not None
            worker.outstanding.add_batch(selection.batch, now_s)
        steps.append((len(selection.batch), selection.wait_until_s))
    return steps


def test_each_free_worker_gets_a_batch() -> None:
    queue = queue_of(7)
    assert carry_out(queue, [SimulatedWorker(1), SimulatedWorker(1)], 0.0) == [(4, None), (3, None)]
    assert not len(queue)


def test_only_the_worker_that_is_free_first_gets_a_full_batch_ahead() -> None:
    workers = [busy_until(0.5), busy_until(0.1)]
    queue = queue_of(9)
    ((sent, until_s),) = carry_out(queue, workers, 0.0)
    assert (sent, until_s) == (0, 0.1 - AHEAD_S)
    assert carry_out(queue, workers, 0.1 - AHEAD_S) == [(4, None), (0, 0.5 - AHEAD_S)]
    assert [worker.outstanding.load for worker in workers] == [1, 2]


def test_less_than_a_full_batch_waits_for_more() -> None:
    assert carry_out(queue_of(3), [busy_until(0.001)], 0.0) == []


def test_while_a_worker_is_overdue_no_batch_is_sent_ahead() -> None:
    for late_s, sent in ((0.0, [(4, None)]), (AHEAD_S / 2, [(4, None)]), (AHEAD_S * 2, [])):
        workers = [busy_until(1.0), busy_until(1.0 + RUN_S)]
        assert carry_out(queue_of(4), workers, 1.0 + late_s) == sent


def test_a_timer_that_fires_when_it_was_set_for_finds_the_worker_free() -> None:
    for end_s in (0.1, 1 / 3, 12345.678901, 98765.4321):
        workers, queue = [busy_until(end_s)], queue_of(4)
        ((_, until_s),) = carry_out(queue, workers, end_s - 0.05)
        assert until_s is not None
        assert carry_out(queue, workers, until_s) == [(4, None)]


# -- which worker


class Sent:
    sent_s = 0.0


@dataclass
class Worker:
    """A worker with calls that were all sent at 0."""

    load: int
    slots: int = 1
    window: int = 0
    outstanding: Outstanding[Sent] = field(init=False)

    def __post_init__(self) -> None:
        self.window = self.window or self.slots
        self.outstanding = Outstanding(self.slots)
        for _ in range(self.load):
            self.outstanding.add(Sent(), 0.0)

    @property
    def credit(self) -> int:
        return self.window - self.load

    @property
    def prefetches(self) -> bool:
        return self.window > self.slots


WORKERS = st.builds(Worker, st.integers(0, 6), st.integers(1, 3), st.sampled_from((0, 8)))
NOW_S = st.sampled_from((0.0, SHORT_S / 2, SHORT_S * 2, 1.0))


@given(st.lists(WORKERS, max_size=5), NOW_S)
def test_a_call_waits_at_a_worker_only_if_none_has_a_free_slot_and_for_short_calls(
    workers: list[Worker], now_s: float
) -> None:
    found = choose(workers, now_s)
    free = [one for one in workers if one.load < one.slots]
    short = [one for one in workers if one.credit > 0 and now_s <= SHORT_S]
    if found is None:
        assert not free
        assert not short
    elif free:
        assert found.load < found.slots
        assert found.load == min(one.load for one in free)
        assert [one for one in free if one.load == found.load][-1] is found
    else:
        assert found in short
        assert found.load == min(one.load for one in short)


def test_a_busy_worker_is_sooner_than_an_idle_one_only_for_calls_that_are_shorter_than_a_wake() -> None:
    usual_s = WAKE_S / 4
    assert [is_soonest(Worker(load, window=9), usual_s, 0.0) for load in (0, 1, 4, 5)] == [
        False,
        True,
        True,
        False,
    ]
    assert not is_soonest(Worker(1, window=9), usual_s, SHORT_S * 2)
    assert not is_soonest(Worker(1, window=1), usual_s, 0.0)
    assert not is_soonest(Worker(1, window=9), 0.0, 0.0)
    # A worker with a free slot is soonest, however long its calls have been running.
    assert is_soonest(Worker(1, slots=2), usual_s, 1.0)


def test_a_worker_is_late_after_the_time_that_was_learned_for_its_calls() -> None:
    curve = LatencyCurve([Point(1, RUN_S, 1.0), Point(4, 2 * RUN_S, 1.0)])
    assert late_after_s(Worker(1), curve) == RUN_S + LATE_S
    assert late_after_s(Worker(1, window=9), curve) == PREFETCH_S + LATE_S
    batches = SimulatedWorker(2)
    for size in (4, 1, 9):
        batches.outstanding.add_batch([SimulatedAttempt(SimulatedCall(0.0)) for _ in range(size)], 0.0)
    assert batches.outstanding.largest == 4

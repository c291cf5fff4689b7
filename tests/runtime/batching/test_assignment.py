"""Assignment: free workers first, full batches a moment ahead, and no endless loop of timers."""

from __future__ import annotations

from pilotflame.runtime.batching.assignment import AHEAD_S, assign
from pilotflame.runtime.batching.latency_curve import LatencyCurve, Point
from pilotflame.runtime.batching.queue import Queue, Slots
from pilotflame.runtime.batching.simulator import SimulatedAttempt, SimulatedCall, SimulatedWorker

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
    """Return how many were sent with each step, and until when to wait."""

    def pick() -> SimulatedWorker | None:
        return next((one for one in workers if one.outstanding.batches < one.outstanding.slots), None)

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
    assert [worker.outstanding.batches for worker in workers] == [1, 2]


def test_less_than_a_full_batch_waits_for_more() -> None:
    assert carry_out(queue_of(3), [busy_until(0.001)], 0.0) == []


def test_a_timer_that_fires_when_it_was_set_for_finds_the_worker_free() -> None:
    for end_s in (0.1, 1 / 3, 12345.678901, 98765.4321):
        workers, queue = [busy_until(end_s)], queue_of(4)
        ((_, until_s),) = carry_out(queue, workers, end_s - 0.05)
        assert until_s is not None
        assert carry_out(queue, workers, until_s) == [(4, None)]

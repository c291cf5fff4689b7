"""The handing out: free workers first, full groups a moment ahead, and never round and round."""

from __future__ import annotations

from dataclasses import dataclass, field

from pilotflame.runtime.batching.assignment import AHEAD_S, hand_out
from pilotflame.runtime.batching.latency_curve import LatencyCurve, Point
from pilotflame.runtime.batching.queue import Lanes, Queue
from pilotflame.runtime.batching.workload import SimulatedAttempt, SimulatedCall


@dataclass
class Given:
    groups: int = 0
    slots: int = 1
    end_s: float = 0.0

    def expected_at(self, now_s: float, _curve: LatencyCurve) -> float:
        return now_s if self.groups < self.slots else self.end_s


@dataclass
class Hand:
    given: Given = field(default_factory=Given)


def queue_of(count: int) -> Queue[SimulatedAttempt]:
    queue: Queue[SimulatedAttempt] = Queue("f", limit=4, most=99, curve=LatencyCurve([Point(1, 0.02, 0.02)]))
    for _ in range(count):
        queue.admit(SimulatedAttempt(SimulatedCall(0.0)), 0.0, Lanes(1, 0.0))
    return queue


def carry_out(
    queue: Queue[SimulatedAttempt], hands: list[Hand], now_s: float
) -> list[tuple[int, float | None]]:
    """How many were sent with each step, and when it is to be looked again."""
    steps = []
    for step in hand_out(
        queue, lambda: next((hand for hand in hands if hand.given.groups < hand.given.slots), None), hands, now_s
    ):  # fmt: skip
        if step.taken:
            assert step.worker is not None
            step.worker.given.groups += 1
        steps.append((len(step.taken), step.look_at_s))
    return steps


def test_each_free_worker_gets_a_group() -> None:
    queue = queue_of(7)
    assert carry_out(queue, [Hand(), Hand()], 0.0) == [(4, None), (3, None)]
    assert not len(queue)


def test_a_full_group_goes_ahead_to_the_one_that_is_free_first_and_only_one() -> None:
    hands = [Hand(Given(1, 1, 0.5)), Hand(Given(1, 1, 0.1))]
    queue = queue_of(9)
    ((sent, look_s),) = carry_out(queue, hands, 0.0)
    assert (sent, look_s) == (0, 0.1 - AHEAD_S)
    assert carry_out(queue, hands, 0.1 - AHEAD_S) == [(4, None), (0, 0.5 - AHEAD_S)]
    assert [hand.given.groups for hand in hands] == [1, 2]


def test_what_is_no_full_group_waits_for_more() -> None:
    assert carry_out(queue_of(3), [Hand(Given(1, 1, 0.001))], 0.0) == []


def test_a_look_that_comes_when_it_was_asked_for_finds_itself_in_time() -> None:
    for end_s in (0.1, 1 / 3, 12345.678901, 98765.4321):
        hands, queue = [Hand(Given(1, 1, end_s))], queue_of(4)
        ((_, look_s),) = carry_out(queue, hands, end_s - 0.05)
        assert look_s is not None
        assert carry_out(queue, hands, look_s) == [(4, None)]

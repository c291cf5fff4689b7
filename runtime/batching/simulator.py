"""The simulator: the queue of the gateway, run on a clock of its own against workers that only take time.

What refuses, orders, gathers and waits is the very code of the gateway; only the workers are imagined: a curve tells
how long a group takes. So it answers what a trace of arrivals would have met, in a fraction of the time.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ...errors import Overloaded, QueueFull
from .assignment import hand_out
from .latency_curve import LatencyCurve, Point
from .queue import Lanes, Queue
from .workload import CallOutcome, SimulatedAttempt, SimulatedCall


@dataclass(frozen=True, slots=True)
class Timed:
    """How long workers take: straight between points (size, seconds), on along the last two, times a random factor."""

    points: tuple[tuple[float, float], ...]
    noise: float = 0.05
    """The standard deviation of the factor."""

    def mean_s(self, size: float) -> float:
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = next((at for at in range(1, len(points)) if size <= points[at][0]), len(points) - 1)
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        return low_s + (size - low) / (high - low) * (high_s - low_s)

    def seconds(self, size: float, draw: random.Random) -> float:
        return self.mean_s(size) * max(0.5, draw.gauss(1.0, self.noise))


def affine(fixed_s: float, each_s: float, noise: float = 0.05) -> Timed:
    """fixed + each x size."""
    return Timed(((1.0, fixed_s + each_s), (2.0, fixed_s + 2 * each_s)), noise)


@dataclass(frozen=True, slots=True)
class Plant:
    """What the calls meet."""

    timed: Timed
    limit: int = 32
    workers: int = 1
    slots: int = 1
    """How many groups one worker runs at the same time."""
    most: int = 1000
    way_s: float = 0.0005
    """From the gateway to a worker; as long back."""
    measured: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
    """The sizes that were measured at warm-up."""
    seed: int = 1

    def curve(self) -> LatencyCurve:
        """The curve as the first worker would have measured it."""
        sizes = [size for size in self.measured if size <= self.limit]
        way_s, timed = 2 * self.way_s, self.timed
        return LatencyCurve(
            Point(size, way_s + timed.mean_s(size), way_s + timed.mean_s(size) * (1 + 1.645 * timed.noise))
            for size in sizes
        )


@dataclass(slots=True)
class SimulatedGroup:
    items: list[SimulatedAttempt]
    begun_s: float
    cost: float


class SimulatedOutstanding:
    """What one worker was given and has not answered, as runtime/serving/outstanding.py counts it."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running: list[SimulatedGroup] = []
        self.busy_s = 0.0
        # When each lane of the worker itself ends what it has.
        self.lanes = [0.0] * slots

    @property
    def groups(self) -> int:
        return len(self.running)

    def free_at(self, now_s: float, curve: LatencyCurve) -> float:
        return max(now_s, self.expected_at(now_s, curve))

    def expected_at(self, now_s: float, curve: LatencyCurve) -> float:
        if len(self.running) < self.slots:
            return now_s
        behind_s = sum(curve.typical(len(group.items)) for group in self.running[self.slots :])
        ends = (group.begun_s + curve.typical(len(group.items)) for group in self.running[: self.slots])
        return min(ends) + behind_s


@dataclass(slots=True)
class Hand:
    """One worker."""

    given: SimulatedOutstanding


@dataclass(slots=True)
class Run:
    """What became of the calls."""

    attempts: list[SimulatedAttempt] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    busy_s: float = 0.0
    """The sum over all lanes."""
    span_s: float = 0.0
    lanes: int = 1


class Simulator:
    """One run. Open loop: `calls` come when they come. Closed: callers make their next call `think` after an answer."""

    def __init__(self, plant: Plant, *, obedient: float = 0.0, curve: LatencyCurve | None = None) -> None:
        """`obedient`: the share of refused callers that come again, once, after their Retry-After."""
        self.plant = plant
        self.queue: Queue[SimulatedAttempt] = Queue(
            "simulated", limit=plant.limit, most=plant.most, curve=plant.curve() if curve is None else curve
        )
        self.run = Run(lanes=plant.workers * plant.slots)
        self._hands = [Hand(SimulatedOutstanding(plant.slots)) for _ in range(plant.workers)]
        self._draw = random.Random(plant.seed)  # noqa: S311  a model of noise
        self._obedient = obedient
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._look_s = math.inf
        self._next_call: Callable[[SimulatedAttempt, float], None] = lambda _attempt, _now_s: None

    # -- the two loops

    def open(self, calls: Iterable[SimulatedCall]) -> Run:
        """All calls, in the order of their times, and until the last is answered."""
        self._arrive_next(iter(calls))
        return self._until(math.inf)

    def closed(self, callers: int, think: Callable[[random.Random], float], duration_s: float) -> Run:
        """So many callers, each with one call at a time, for so long."""

        def again(attempt: SimulatedAttempt, now_s: float) -> None:
            pause_s = max(think(self._draw), attempt.retry_after_s or 0.0)
            self._call(SimulatedCall(now_s + pause_s, body=attempt.body), attempt.caller)

        self._next_call = again
        for caller in range(callers):
            self._call(SimulatedCall(think(self._draw), body=str(caller).encode()), caller)
        return self._until(duration_s)

    def _call(self, call: SimulatedCall, caller: int, tries: int = 1) -> None:
        attempt = SimulatedAttempt(call, caller, tries)
        self._at(call.at_s, lambda now_s: self._arrive(attempt, now_s))

    def _arrive_next(self, calls: Iterator[SimulatedCall]) -> None:
        if (call := next(calls, None)) is not None:
            attempt = SimulatedAttempt(call)

            def arrive(now_s: float) -> None:
                self._arrive_next(calls)
                self._arrive(attempt, now_s)

            self._at(call.at_s, arrive)

    def _until(self, end_s: float) -> Run:
        now_s = 0.0
        while self._events and self._events[0][0] <= end_s:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        self.run.span_s = now_s
        return self.run

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    # -- the gateway, as runtime/serving/dispatcher.py

    def _arrive(self, attempt: SimulatedAttempt, now_s: float) -> None:
        self.run.attempts.append(attempt)
        try:
            self.queue.admit(attempt, now_s, self._lanes(now_s))
        except Overloaded as error:
            return self._refuse(attempt, now_s, CallOutcome.REFUSED, error)
        except QueueFull as error:
            return self._refuse(attempt, now_s, CallOutcome.FULL, error)
        if attempt.deadline_s < math.inf:
            self._at(attempt.deadline_s, lambda when_s: self._expire(attempt, when_s))
        return self._pump(now_s)

    def _refuse(
        self, attempt: SimulatedAttempt, now_s: float, outcome: CallOutcome, error: Overloaded | QueueFull
    ) -> None:
        attempt.retry_after_s = retry_s = float((error.details or {})["retry_after_s"])
        self._end(attempt, now_s, outcome)
        if attempt.caller < 0 and attempt.tries == 1 and self._draw.random() < self._obedient:
            call = attempt.call
            again = SimulatedCall(
                now_s + retry_s, call.timeout_s, call.tenant, call.priority, call.cost, call.body
            )
            self._call(again, -1, attempt.tries + 1)

    def _expire(self, attempt: SimulatedAttempt, now_s: float) -> None:
        if attempt.outcome is None:
            dropped = self.queue.drop(attempt)
            self._end(attempt, now_s, CallOutcome.EXPIRED if dropped else CallOutcome.LATE)

    def _end(self, attempt: SimulatedAttempt, now_s: float, outcome: CallOutcome) -> None:
        attempt.outcome, attempt.ended_s = outcome, now_s
        self._next_call(attempt, now_s)

    def _lanes(self, now_s: float) -> Lanes:
        free_s = min(hand.given.free_at(now_s, self.queue.curve) for hand in self._hands)
        return Lanes(self.run.lanes, free_s)

    def _pick(self) -> Hand | None:
        hand = min(self._hands, key=lambda hand: hand.given.groups)
        return hand if hand.given.groups < hand.given.slots else None

    def _pump(self, now_s: float) -> None:
        for step in hand_out(self.queue, self._pick, self._hands, now_s):
            for attempt in step.refused:
                error = self.queue.refusal(attempt, now_s, self._lanes(now_s))
                self._refuse(attempt, now_s, CallOutcome.DROPPED, error)
            if step.taken and step.worker is not None:
                self._send(step.worker, step.taken, now_s)
            if step.look_at_s is not None:
                self._look_s = step.look_at_s
                self._at(step.look_at_s, self._look)

    def _look(self, now_s: float) -> None:
        if now_s >= self._look_s:  # of several that were set, only the last counts
            self._look_s = math.inf
            self._pump(now_s)

    # -- the workers

    def _send(self, hand: Hand, taken: list[SimulatedAttempt], now_s: float) -> None:
        given, plant = hand.given, self.plant
        cost = sum(attempt.call.cost for attempt in taken)
        group = SimulatedGroup(taken, now_s if given.groups < given.slots else 0.0, cost)
        given.running.append(group)
        lane = min(range(plant.slots), key=lambda index: given.lanes[index])
        begins_s = max(now_s + plant.way_s, given.lanes[lane])
        seconds = plant.timed.seconds(cost, self._draw)
        given.lanes[lane] = begins_s + seconds
        self.run.busy_s += seconds
        self.run.sizes.append(len(taken))
        self._at(begins_s + seconds + plant.way_s, lambda when_s: self._answer(given, group, when_s))

    def _answer(self, given: SimulatedOutstanding, group: SimulatedGroup, now_s: float) -> None:
        given.running.remove(group)
        if given.groups >= given.slots and not (follower := given.running[given.slots - 1]).begun_s:
            follower.begun_s = now_s
        if group.begun_s:
            self.queue.ended(now_s, len(group.items), group.cost, now_s - group.begun_s)
        for attempt in group.items:
            self.queue.charge(attempt, attempt.call.cost)
            if attempt.outcome is None:
                self._end(attempt, now_s, CallOutcome.ON_TIME)
        self._pump(now_s)

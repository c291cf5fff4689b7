"""Runs the gateway's queue with a simulated clock and workers, to predict how arrivals would be served.

Admission, order, batch forming and assignment are the gateway's own code. Only the durations of batches come
from a model.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from ....errors import Overloaded, PilotflameError, QueueFull
from .assignment import assign
from .latency_curve import LatencyCurve, Point
from .outstanding import Outstanding
from .queue import Queue, Slots

# The batch sizes in `SimulatedFunction.curve`, up to max_batch: the powers of two that workers measure.
MEASURED = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class SimulatedCall:
    """A call that arrives at `at_s`, and whose deadline is `timeout_s` later."""

    at_s: float
    timeout_s: float = math.inf
    tenant: str = ""
    body: bytes = b""
    tries: int = 1
    """1 for the first try of a call, 2 for its retry."""


class CallOutcome(Enum):
    ON_TIME = "on_time"
    LATE = "late"
    """It was sent to a worker, but did not end by its deadline."""
    REFUSED = "refused"
    """Refused on arrival, because it was predicted to miss its deadline."""
    DROPPED = "dropped"
    """Refused while it waited, because it would have missed its deadline and delayed others."""
    EXPIRED = "expired"
    """Its deadline passed while it waited."""
    FULL = "full"
    """Refused because the queue was full."""


class SimulatedAttempt:
    """A call that waits or runs, and its outcome once it has ended. It has the attributes of an Item."""

    priority, patient, max_batch, first, sent_s = 3, False, 0, False, 0.0
    ended_s = 0.0
    outcome: CallOutcome | None = None
    retry_after_s: float | None = None

    def __init__(self, call: SimulatedCall) -> None:
        self.call, self.tenant, self.body, self.tries = call, call.tenant, call.body, call.tries
        self.timeout_s, self.deadline_s = call.timeout_s, call.at_s + call.timeout_s

    def end(self, outcome: CallOutcome, now_s: float, retry_after_s: float | None = None) -> None:
        self.outcome, self.ended_s, self.retry_after_s = outcome, now_s, retry_after_s

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.call.at_s


def poisson(
    rate: float, count: int, *, timeout_s: float = math.inf, tenant: str = "", seed: int = 1
) -> Iterator[SimulatedCall]:
    """Yield `count` calls at random times, `rate` per second on average, each with a different body."""
    draw, at_s = random.Random(seed), 0.0  # noqa: S311  a model of chance
    for number in range(count):
        at_s += draw.expovariate(rate)
        yield SimulatedCall(at_s, timeout_s, tenant, body=f"{tenant}{number}".encode())


@dataclass(frozen=True, slots=True)
class DurationModel:
    """A model of the durations of batches: the mean for the size of a batch, times a random factor."""

    points: tuple[tuple[float, float], ...]
    """Points (size, seconds) of the mean. The mean is constant before the first point and linear between two points. After
    the last point, it continues the line between the last two points."""
    noise: float = 0.05
    """The standard deviation of the factor, which has the mean 1."""

    def mean_s(self, size: float) -> float:
        points = self.points
        if size <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = next((at for at in range(1, len(points)) if size <= points[at][0]), len(points) - 1)
        (low, low_s), (high, high_s) = points[right - 1], points[right]
        return low_s + (size - low) / (high - low) * (high_s - low_s)

    def seconds(self, size: float, draw: random.Random) -> float:
        return self.mean_s(size) * max(0.5, draw.gauss(1.0, self.noise))


@dataclass(frozen=True, slots=True)
class SimulatedFunction:
    """The function that the calls invoke, and its workers."""

    durations: DurationModel
    max_batch: int = 32
    workers: int = 1
    slots: int = 1
    """How many batches one worker runs at a time."""
    max_queue: int = 1000
    transit_s: float = 0.0005
    """The time from the gateway to a worker. The way back takes the same time."""
    seed: int = 1

    def curve(self) -> LatencyCurve:
        """Return the latency curve that the first worker would have measured."""
        # 95 % of normally distributed values are below the mean plus 1.645 standard deviations.
        spread = 1 + 1.645 * self.durations.noise
        means = [(size, self.durations.mean_s(size)) for size in MEASURED if size <= self.max_batch]
        transit_s = 2 * self.transit_s
        return LatencyCurve(Point(size, transit_s + s, transit_s + s * spread) for size, s in means)


class SimulatedWorker:
    """A worker. For each slot, `_free_s` has the time at which the slot will have run all its batches."""

    def __init__(self, slots: int) -> None:
        self.outstanding: Outstanding[SimulatedAttempt] = Outstanding(slots, batching=True)
        self._free_s = [0.0] * slots

    def run(self, arrives_s: float, seconds: float) -> float:
        """Run a batch, which takes `seconds`, in the slot that is free first. Return its end time."""
        slot = self._free_s.index(min(self._free_s))
        self._free_s[slot] = max(arrives_s, self._free_s[slot]) + seconds
        return self._free_s[slot]


@dataclass(slots=True)
class Run:
    """The outcomes of a run. `sizes` has the sizes of its batches, and `span_s` is the time of its last event."""

    attempts: list[SimulatedAttempt] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    busy_s: float = 0.0
    """The seconds in which batches ran, summed over all slots."""
    span_s: float = 0.0
    slots: int = 1


class Simulator:
    """Simulates calls at given times, and the further calls that their callers make after an outcome."""

    def __init__(
        self, function: SimulatedFunction, *, curve: LatencyCurve | None = None,
        queue_type: type[Queue[SimulatedAttempt]] = Queue,
        next_call: Callable[[SimulatedAttempt], SimulatedCall | None] = lambda _attempt: None,
    ) -> None:  # fmt: skip
        """`next_call` returns the next call of an ended attempt's caller: a retry, another call, or None."""
        curve = curve or function.curve()
        self.queue = queue_type(
            "simulated", curve=curve, max_batch=function.max_batch, max_queue=function.max_queue
        )
        self._run = Run(slots=function.workers * function.slots)
        self._function = function
        self._workers = [SimulatedWorker(function.slots) for _ in range(function.workers)]
        self._draw = random.Random(function.seed)  # noqa: S311  a model of noise
        self._next_call = next_call
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._dispatch_s = math.inf

    def run(self, calls: Iterable[SimulatedCall], until_s: float = math.inf) -> Run:
        """Run calls, which must be ordered by time, until all have ended or the clock is at `until_s`."""
        self._arrive_next(iter(calls))
        now_s = 0.0
        while self._events and self._events[0][0] <= until_s:
            now_s, _, happen = heapq.heappop(self._events)
            happen(now_s)
        self._run.span_s = now_s
        return self._run

    def _arrive_next(self, calls: Iterator[SimulatedCall]) -> None:
        if (call := next(calls, None)) is not None:
            attempt = SimulatedAttempt(call)

            def arrive(now_s: float) -> None:
                self._arrive_next(calls)
                self._arrive(attempt, now_s)

            self._at(call.at_s, arrive)

    def _at(self, when_s: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._numbers), happen))

    # -- the gateway: the same steps as in runtime/calls/serving/dispatcher.py

    def _arrive(self, attempt: SimulatedAttempt, now_s: float) -> None:
        self._run.attempts.append(attempt)
        try:
            self.queue.admit(attempt, now_s, self._slots(now_s))
        except (Overloaded, QueueFull) as error:
            outcome = CallOutcome.FULL if isinstance(error, QueueFull) else CallOutcome.REFUSED
            return self._end(attempt, now_s, outcome, error)
        if attempt.deadline_s < math.inf:
            self._at(attempt.deadline_s, lambda when_s: self._expire(attempt, when_s))
        return self._dispatch(now_s)

    def _expire(self, attempt: SimulatedAttempt, now_s: float) -> None:
        if attempt.outcome is None:
            waited = self.queue.remove(attempt)
            self._end(attempt, now_s, CallOutcome.EXPIRED if waited else CallOutcome.LATE)

    def _end(
        self, attempt: SimulatedAttempt, now_s: float, outcome: CallOutcome,
        error: PilotflameError | None = None,
    ) -> None:  # fmt: skip
        attempt.end(outcome, now_s, None if error is None else float(error.details["retry_after_s"]))
        if (call := self._next_call(attempt)) is not None:
            self._arrive_next(iter([call]))

    def _slots(self, now_s: float) -> Slots:
        free_s = min(worker.outstanding.expected_at(now_s, self.queue.curve) for worker in self._workers)
        return Slots(self._run.slots, free_s)

    def _pick(self) -> SimulatedWorker | None:
        worker = min(self._workers, key=lambda worker: worker.outstanding.load)
        return worker if worker.outstanding.load < worker.outstanding.slots else None

    def _dispatch(self, now_s: float) -> None:
        for worker, selection in assign(self.queue, self._pick, self._workers, now_s):
            for attempt in selection.refused:
                error = self.queue.refusal(attempt, now_s, self._slots(now_s))
                self._end(attempt, now_s, CallOutcome.DROPPED, error)
            if selection.batch and worker is not None:
                self._send(worker, selection.batch, now_s)
            if selection.wait_until_s is not None:
                self._dispatch_s = selection.wait_until_s
                self._at(selection.wait_until_s, self._on_timer)

    def _on_timer(self, now_s: float) -> None:
        """Dispatch, unless the timer was set to a later time meanwhile."""
        if now_s >= self._dispatch_s:
            self._dispatch_s = math.inf
            self._dispatch(now_s)

    # -- the workers

    def _send(self, worker: SimulatedWorker, batch: list[SimulatedAttempt], now_s: float) -> None:
        channels = worker.outstanding.add_batch(batch, now_s)
        transit_s = self._function.transit_s
        seconds = self._function.durations.seconds(len(batch), self._draw)
        self._run.busy_s += seconds
        self._run.sizes.append(len(batch))
        back_s = worker.run(now_s + transit_s, seconds) + transit_s
        self._at(back_s, lambda when_s: self._respond(worker, channels, when_s))

    def _respond(self, worker: SimulatedWorker, channels: list[int], now_s: float) -> None:
        for channel in channels:
            attempt = worker.outstanding.calls[channel]
            if attempt.outcome is None:
                self._end(attempt, now_s, CallOutcome.ON_TIME)
            _, ended = worker.outstanding.remove(channel, now_s)
            if ended is not None and ended.seconds:
                self.queue.forecast.observe_batch(now_s, *ended)
        self._dispatch(now_s)

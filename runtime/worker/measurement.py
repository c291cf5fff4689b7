"""The measurement: how long a batch handler takes for 1, 2, 4 … events of its example, before real ones come."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from itertools import cycle, islice
from statistics import median
from typing import Any

import orjson

from ...handlers.contract import BatchSpec, Cancellation, Context
from ..batching.latency_curve import Point
from .exhaustion import exhausted
from .runner import Call, Runner

# It delays the first answer of a worker: a handler that takes longer is measured in small batches only.
BUDGET_S = 4.0
RUNS = 3


def sizes(max_size: int) -> list[int]:
    """1, 2, 4 … and `max_size`."""
    return [*(1 << power for power in range((max_size - 1).bit_length())), max_size]


def schedule(max_size: int, points: list[Point], budget_s: float = BUDGET_S) -> Generator[int, float, None]:
    """Yields how many events to run next, is sent what they took, and adds to `points`: the median, and the longest of
    so few runs for the 95th percentile.

    Each size is run once to warm it up and then `RUNS` times, fewer if the budget ends. A size is not begun if the
    rest of the budget would not suffice were it no slower than the one before.
    """
    spent_s = last_s = 0.0
    for size in sizes(max_size):
        if spent_s + (1 + RUNS) * last_s > budget_s:
            return
        spent_s += yield size
        taken_s: list[float] = []
        while len(taken_s) < RUNS and (not taken_s or spent_s < budget_s):
            taken_s.append((yield size))
            spent_s += taken_s[-1]
        last_s = median(taken_s)
        points.append(Point(size, last_s, max(taken_s)))


class Measurement:
    """Runs the example of one worker's handler. What it has when a run fails is its curve."""

    def __init__(self, runner: Runner, context: Context, abandoned: Callable[[], bool]) -> None:
        """`context` is what every event is given; it ends early once `abandoned`."""
        self.curve: list[Point] = []
        self._runner = runner
        self._context = context
        self._abandoned = abandoned
        spec = runner.handler.batch or BatchSpec(1)
        self._bodies = [orjson.dumps(example) for example in spec.examples]
        self._schedule = schedule(spec.max_size, self.curve)
        self._size = 0

    def run(self, gate: Callable[[], AbstractContextManager[Any]]) -> None:
        """Raises what the handler raises."""
        size = self._next(None)
        while size:
            arguments = self._arguments(size)
            started_s = time.monotonic()
            with gate():
                answer = self._runner.handler.call(*arguments)
            size = self._next(time.monotonic() - started_s, answer)

    async def run_async(self) -> None:
        """The same of an async handler."""
        size = self._next(None)
        while size:
            arguments = self._arguments(size)
            started_s = time.monotonic()
            answer = await self._runner.handler.call(*arguments)
            size = self._next(time.monotonic() - started_s, answer)

    def note(self, error: BaseException) -> None:
        """It ended with this: so many events may be too many for the memory."""
        if exhausted(error):
            self._runner.limit = max(1, self._size // 2)

    def _next(self, taken_s: float | None, answer: Any = None) -> int:
        """How many to run now; 0 at the end."""
        if taken_s is not None:
            for item in self._runner.answers(self._calls(self._size), answer):
                if isinstance(item, BaseException):
                    raise item
        if self._abandoned():
            return 0
        try:
            self._size = next(self._schedule) if taken_s is None else self._schedule.send(taken_s)
        except StopIteration:
            return 0
        return self._size

    def _arguments(self, size: int) -> tuple[Any, ...]:
        bodies = islice(cycle(self._bodies), size)
        events = [self._runner.handler.input.decode(body) for body in bodies]
        return self._runner.arguments(self._calls(size), events)

    def _calls(self, size: int) -> list[Call]:
        return [Call(0, b"", "", self._context, Cancellation()) for _ in range(size)]

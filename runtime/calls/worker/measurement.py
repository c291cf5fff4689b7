"""Measures how long a batch handler takes for 1, 2, 4 … of its example events, before real events arrive."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from itertools import cycle, islice
from statistics import median
from typing import Any

import orjson

from ....handlers.contract import Context
from ....handlers.failure import is_out_of_memory
from ....handlers.handler import Handler, HandlerKind
from ..batching.latency_curve import Point
from .runner import Runner

# How long the measurement may take, because it delays the worker's first answer.
BUDGET_S = 4.0
# How often each size is measured, after one run that is not counted.
RUNS = 3


def sizes(max_size: int) -> list[int]:
    """Return the powers of two below `max_size`, and `max_size`."""
    return [*(1 << power for power in range((max_size - 1).bit_length())), max_size]


def schedule(max_size: int, curve: list[Point], budget_s: float = BUDGET_S) -> Generator[int, float, None]:
    """Yield the number of events to run next. The caller sends back how many seconds they took.

    A point for each size is added to `curve`, in ascending order. Each size runs once to warm up, and then at least
    once and up to `RUNS` times, while the budget is not used up. The schedule ends before a size if the rest of the
    budget would not suffice to measure even the previous size again. A point has the median of the runs. Its 95th
    percentile is their maximum, because there are few runs.
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
        curve.append(Point(size, last_s, max(taken_s)))


async def measure(runner: Runner, context: Context, curve: list[Point], stopped: Callable[[], bool]) -> None:
    """Call the runner's handler with its examples and add the points to `curve`, until `stopped()`.

    Raise what the handler raises. If memory runs out, first set the runner's limit to half of the size.
    """
    handler = runner.handler
    if (spec := handler.batch) is None or not spec.examples:
        return
    bodies = [orjson.dumps(example) for example in spec.examples]
    steps = schedule(spec.max_size, curve)
    size = next(steps)
    while not stopped():
        events = [handler.input.decode(body) for body in islice(cycle(bodies), size)]
        arguments = handler.arguments(Context.of_batch([context] * size), events)
        try:
            taken_s = await timed_call(handler, arguments, size)
        except BaseException as error:
            if is_out_of_memory(error):
                runner.limits.limit = max(1, size // 2)
            raise
        try:
            size = steps.send(taken_s)
        except StopIteration:
            return


async def timed_call(handler: Handler, arguments: tuple[Any, ...], size: int) -> float:
    """Call the handler, read a stream to its end, and return how long that took. If an answer is an exception, raise
    it.
    """
    started_s = time.monotonic()
    answer = handler.call(*arguments)
    if handler.kind is HandlerKind.ASYNC:
        answer = await answer
    elif handler.kind is HandlerKind.ASYNC_GENERATOR:
        answer = [chunk async for chunk in answer]
    elif handler.kind is HandlerKind.GENERATOR:
        answer = list(answer)
    taken_s = time.monotonic() - started_s
    for item in handler.answers(answer, size):
        if isinstance(item, BaseException):
            raise item
    return taken_s

"""How many requests of a trace an engine answers in time under overload, with targets and without.

A request is in time if its first token and the mean time of its later tokens take at most LIMIT times the medians of an idle
engine. A refused request comes again as `Retry-After` says, and its times count from the first try, so it is late. The rate is one at which
an engine without targets answers about half of the requests in time.
"""

from __future__ import annotations

import asyncio
import csv
import gzip
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pilotflame.errors import Overloaded
from pilotflame.handlers.language_model.admission import Targets
from pilotflame.handlers.language_model.contract import Sampling
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.sampling import Sampler

TRACE = Path(__file__).with_name("data") / "azure-llm-2023-conv.csv.gz"
SCALE, ANSWER_SCALE = 16, 8
"""The trace's contexts and answers are divided by these, for a small model on a processor."""
LIMIT = 5
REQUESTS = 100
RATE = 4.0
"""Requests a second."""
WORDS = 32_000
GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Call:
    """A request of the trace."""

    at: float
    """When it comes, in mean times between two requests."""
    ids: list[int]
    new: int


@dataclass(frozen=True)
class Outcome:
    """The times of a request, in seconds."""

    first_s: float
    token_s: float
    in_window: int
    """The tokens that were made before the last request came."""


@dataclass(frozen=True)
class Limits:
    """What counts as in time."""

    first_s: float
    token_s: float

    def met(self, outcome: Outcome) -> bool:
        return outcome.first_s <= self.first_s and outcome.token_s <= self.token_s


def calls() -> list[Call]:
    """Return the first requests of the trace."""
    with gzip.open(TRACE, "rt") as lines:
        rows = [row for row, _ in zip(csv.DictReader(lines), range(REQUESTS), strict=False)]
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    mean_s = (times[-1] - times[0]) / len(times)
    drawn = random.Random(1)
    return [
        Call(
            (at_s - times[0]) / mean_s,
            [drawn.randrange(3, WORDS) for _ in range(max(4, int(row["ContextTokens"]) // SCALE))],
            max(2, int(row["GeneratedTokens"]) // ANSWER_SCALE),
        )
        for at_s, row in zip(times, rows, strict=True)
    ]


async def call(engine: Engine, one: Call, limits: Limits | None, until_s: float) -> Outcome:
    """Run a request until it is answered. With `limits`, they are its targets."""
    began_s = time.monotonic()
    while True:
        targets = Targets(time.monotonic() + limits.first_s, limits.token_s) if limits else Targets()
        try:
            return await answered(engine, one, targets, began_s, until_s)
        except Overloaded as error:
            await asyncio.sleep(error.details["retry_after_s"])


async def answered(engine: Engine, one: Call, targets: Targets, began_s: float, until_s: float) -> Outcome:
    """Run a request that has begun at `began_s`. Raise Overloaded if it is refused."""
    tokens = engine.generate(one.ids, Sampler(GREEDY, one.ids, ()), (), one.new, targets=targets)
    async with aclosing(tokens):
        times_s = [time.monotonic() async for _ in tokens]
    first_s, last_s = times_s[0], times_s[-1]
    in_window = sum(at_s < until_s for at_s in times_s)
    return Outcome(first_s - began_s, (last_s - first_s) / (len(times_s) - 1), in_window)


async def replay(engine: Engine, trace: Sequence[Call], rate: float, limits: Limits | None) -> list[Outcome]:
    """Send the requests at `rate` a second, and return their outcomes."""
    began_s = time.monotonic()
    until_s = began_s + trace[-1].at / rate

    async def sent(one: Call) -> Outcome:
        await asyncio.sleep(began_s + one.at / rate - time.monotonic())
        return await call(engine, one, limits, until_s)

    return await asyncio.gather(*(sent(one) for one in trace))


async def unloaded(engine: Engine, trace: Sequence[Call]) -> Limits:
    """Return the limits: LIMIT times the medians of requests that run alone."""
    found = [await call(engine, one, None, 0.0) for one in trace[:15]]
    return Limits(
        LIMIT * statistics.median(one.first_s for one in found),
        LIMIT * statistics.median(one.token_s for one in found),
    )


async def goodput(engine: Engine, plain: Engine, rounds: int) -> tuple[float, float]:
    """Return two ratios, of requests in time and of tokens: of an engine with targets to `plain` without."""
    trace = calls()
    limits = await unloaded(plain, trace)
    # The engine learns how long its steps take.
    await unloaded(engine, trace)
    ratios: list[tuple[float, float]] = []
    for _ in range(rounds):
        fifo = await replay(plain, trace, RATE, None)
        ours = await replay(engine, trace, RATE, limits)
        in_time = sum(map(limits.met, ours)) / max(1, sum(map(limits.met, fifo)))
        ratios.append((in_time, sum(one.in_window for one in ours) / sum(one.in_window for one in fifo)))
    return statistics.median(one for one, _ in ratios), statistics.median(one for _, one in ratios)

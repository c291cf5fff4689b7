"""How many requests of a trace an engine answers in time under overload, with targets and without.

A request is in time if its first token and the mean time of its later tokens take at most LIMIT times the medians of an idle
engine. The rate is one at which an engine without targets answers about half of the requests in time.
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


@dataclass
class Outcome:
    """The times of a request. Times are in seconds; None: it was refused."""

    first_s: float | None = None
    token_s: float = 0.0
    in_window: int = 0
    """The tokens that were made before the last request came."""


@dataclass(frozen=True)
class Limits:
    """What counts as in time."""

    first_s: float
    token_s: float

    def met(self, outcome: Outcome) -> bool:
        return (
            outcome.first_s is not None
            and outcome.first_s <= self.first_s
            and outcome.token_s <= self.token_s
        )


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
    """Run a request. With `limits`, they are its targets."""
    began_s = time.monotonic()
    targets = Targets(began_s + limits.first_s, limits.token_s) if limits else Targets()
    outcome, last_s, made = Outcome(), began_s, 0
    tokens = engine.generate(one.ids, Sampler(GREEDY, one.ids, ()), (), one.new, targets=targets)
    try:
        async with aclosing(tokens):
            async for _ in tokens:
                last_s = time.monotonic()
                made += 1
                outcome.in_window += last_s < until_s
                if outcome.first_s is None:
                    outcome.first_s = last_s - began_s
    except Overloaded:
        return Outcome()
    outcome.token_s = (last_s - began_s - (outcome.first_s or 0.0)) / (made - 1)
    return outcome


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
    first_s = statistics.median(one.first_s or 0.0 for one in found)
    return Limits(LIMIT * first_s, LIMIT * statistics.median(one.token_s for one in found))


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

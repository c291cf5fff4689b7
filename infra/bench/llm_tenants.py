"""Eight tenants of one engine. What seven of them notice if the eighth sends 128 long prompts at once instead of one short prompt at a time."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling

WORDS = 32_000
PROMPT, ANSWER = 32, 24
LONG_PROMPT, LONG_ANSWER, ANSWERS = 800, 200, 128
PAUSE_S = 1.0
FOR_S = 20.0
WARMUP_S = 4.0
"""The first seconds, which do not count."""
GREEDY = Sampling(temperature=0.0)


@dataclass
class Times:
    """The times that callers have waited, in seconds."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)

    def median_ms(self) -> tuple[float, float]:
        return statistics.median(self.first) * 1e3, statistics.median(self.later) * 1e3


async def run(engine: Engine, prompt: int, answer: int, tenant: str, drawn: random.Random) -> list[float]:
    """Return when the request was sent, and when each token came."""
    ids = [drawn.randrange(3, WORDS) for _ in range(prompt)]
    times_s = [time.monotonic()]
    async with aclosing(engine.generate(ids, Sampler(GREEDY, ids, ()), (), answer, tenant=tenant)) as tokens:
        times_s += [time.monotonic() async for _ in tokens]
    return times_s


async def ordinary(engine: Engine, tenant: str, began_s: float, times: Times) -> None:
    """Send one request after the other, with random pauses, and note the times."""
    drawn = random.Random(tenant)
    while time.monotonic() < began_s + FOR_S:
        await asyncio.sleep(drawn.expovariate(1 / PAUSE_S))
        sent_s, *made_s = await run(engine, PROMPT, ANSWER, tenant, drawn)
        if sent_s > began_s + WARMUP_S:
            times.first.append(made_s[0] - sent_s)
            times.later += [after - before for before, after in itertools.pairwise(made_s)]


async def greedy(engine: Engine, tenant: str) -> None:
    """Ask for many long answers at once, again and again."""
    drawn = random.Random(tenant)
    while True:
        await asyncio.gather(*(run(engine, LONG_PROMPT, LONG_ANSWER, tenant, drawn) for _ in range(ANSWERS)))


async def seven_beside(engine: Engine, *, flood: bool, named: bool) -> Times:
    """Return the times of seven tenants. Without `named`, the engine takes all callers for one tenant."""
    times, began_s = Times(), time.monotonic()
    names = [f"tenant {number}" if named else "" for number in range(8)]
    eighth = greedy(engine, names[7]) if flood else ordinary(engine, names[7], began_s, Times())
    beside = asyncio.create_task(eighth)
    await asyncio.gather(*(ordinary(engine, name, began_s, times) for name in names[:7]))
    beside.cancel()
    await asyncio.wait([beside])
    return times


def ratios(make: Callable[[], Engine], rounds: int, *, named: bool = True) -> tuple[float, float, str]:
    """Return how many times as long tokens take beside the flood: the first ones, the later ones, and the last round's times in words."""
    found: list[tuple[float, float]] = []
    words = ""
    for _ in range(rounds):
        usual, slow = (
            asyncio.run(seven_beside(make(), flood=flood, named=named)).median_ms() for flood in (False, True)
        )
        found.append((slow[0] / usual[0], slow[1] / usual[1]))
        words = f"first token {usual[0]:.0f} and {slow[0]:.0f} ms, later tokens {usual[1]:.1f} and {slow[1]:.1f} ms"
    first, later = zip(*found, strict=True)
    return statistics.median(first), statistics.median(later), words

"""Arrivals of requests in many patterns, for benchmarks of the keep-alive policy. Each class is a list of functions."""

from __future__ import annotations

import csv
import gzip
import math
import random
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import cache
from itertools import accumulate, islice
from pathlib import Path

# The Azure LLM trace 2023, conversations: see data/README.md.
AZURE = Path(__file__).with_name("data") / "azure-llm-2023-conv.csv.gz"
REQUESTS, DAY_S = 1200, 86400.0
MEANS_S = (2.0, 10.0, 60.0, 300.0, 1800.0, 10800.0)
Gaps = Iterator[float]


def classes(seed: int) -> dict[str, list[list[float]]]:
    """Return the arrivals of each class of functions, in seconds."""
    made: dict[str, Callable[[random.Random, int], Gaps]] = {
        "poisson": lambda rnd, number: _poisson(rnd, MEANS_S[number]),
        "pareto": lambda rnd, number: _pareto(rnd, 0.8 + 0.12 * number),
        "lognormal": lambda rnd, number: _lognormal(rnd, 1.5 + 0.2 * number),
        "bursty": lambda rnd, number: _bursts(rnd, MEANS_S[number] * 10),
    }
    found = {}
    for name, gaps in made.items():
        found[name] = [_whole(gaps(_random(seed, name, one), one)) for one in range(6)]
    found["timer"] = [_timer(_random(seed, "timer", one), period) for one, period in enumerate(MEANS_S[1:])]
    found["diurnal"] = [_diurnal(_random(seed, "diurnal", one), mean) for one, mean in enumerate(MEANS_S[2:])]
    found["mixed"] = mixed_fleet(seed)
    found["azure"] = azure(_random(seed, "azure", 0))
    return found


def mixed_fleet(seed: int, functions: int = 60, days: float = 2.0) -> list[list[float]]:
    """Return the arrivals of `functions` functions with patterns of every class, within `days` days."""
    fleet = []
    for number in range(functions):
        rnd = _random(seed, "fleet", number)
        mean_s = 10 ** rnd.uniform(1.3, 4.0)
        kind = number % 6
        if kind == 0:
            arrivals = _timer(rnd, mean_s)
        elif kind == 1:
            arrivals = _diurnal(rnd, mean_s)
        else:
            gaps = (
                _poisson(rnd, mean_s), _bursts(rnd, mean_s * 10), _lognormal(rnd, 2.0, mean_s / 7),
                _pareto(rnd, rnd.uniform(1.05, 1.4), mean_s / 10),
            )[kind - 2]  # fmt: skip
            arrivals = _whole(gaps, 20_000)
        fleet.append([at_s for at_s in arrivals if at_s <= days * DAY_S])
    return [arrivals for arrivals in fleet if len(arrivals) > 1]


def azure(rnd: random.Random, functions: int = 48) -> list[list[float]]:
    """Return one hour of the Azure LLM chat trace, dealt to functions whose shares follow Zipf's law."""
    shares = [1 / (number + 1) for number in range(functions)]
    dealt: list[list[float]] = [[] for _ in range(functions)]
    for at_s in _read():
        dealt[rnd.choices(range(functions), shares)[0]].append(at_s)
    return [arrivals for arrivals in dealt if len(arrivals) > 1]


@cache
def _read() -> list[float]:
    """Return the instants of the requests of the trace, in seconds after the first."""
    with gzip.open(AZURE, "rt") as file:
        times = sorted(datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(file))
    return [(moment - times[0]).total_seconds() for moment in times]


def _random(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed} {name} {number}")


def _whole(gaps: Gaps, count: int = REQUESTS) -> list[float]:
    arrivals = accumulate(islice(gaps, count))
    return [at_s for at_s in arrivals if at_s < 60 * DAY_S]


def _poisson(rnd: random.Random, mean_s: float) -> Gaps:
    while True:
        yield rnd.expovariate(1 / mean_s)


def _pareto(rnd: random.Random, shape: float, least_s: float = 5.0) -> Gaps:
    while True:
        yield least_s * rnd.paretovariate(shape)


def _lognormal(rnd: random.Random, sigma: float, median_s: float = 30.0) -> Gaps:
    while True:
        yield median_s * math.exp(rnd.gauss(0, sigma))


def _bursts(rnd: random.Random, mean_s: float) -> Gaps:
    """Yield the gaps in and between bursts. A burst has 10 to 100 calls, a quarter of a second apart on average."""
    while True:
        yield rnd.expovariate(1 / mean_s)
        for _ in range(rnd.randint(10, 100) - 1):
            yield rnd.expovariate(4)


def _timer(rnd: random.Random, period_s: float) -> list[float]:
    """Return the times of a timer with 1 % of jitter that misses 5 % of its times."""
    times = [period_s * (number + 1) + rnd.gauss(0, 0.01 * period_s) for number in range(REQUESTS)]
    return sorted(max(0.0, at_s) for at_s in times if rnd.random() > 0.05)


def _diurnal(rnd: random.Random, mean_s: float) -> list[float]:
    """Return arrivals whose rate varies by 50:1 between day and night, drawn by thinning."""
    now_s, arrivals = 0.0, list[float]()
    most = 2 / mean_s
    while len(arrivals) < REQUESTS and now_s < 60 * DAY_S:
        now_s += rnd.expovariate(most)
        level = 0.5 + 0.5 * math.sin(2 * math.pi * now_s / DAY_S)
        if rnd.random() < 50 ** (level - 1):
            arrivals.append(now_s)
    return arrivals

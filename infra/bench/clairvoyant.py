"""The queue's policy beside a clairvoyant one: which share of requests is answered within its deadline.

    python infra/bench/clairvoyant.py [--count N]

Both serve the same random arrivals with one simulated worker. The policy knows the past. The clairvoyant scheduler
knows every arrival and every duration in advance, so no policy can do better: where it misses deadlines, the load does
not fit. Each deadline is DEADLINES times the duration of a batch of one.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from pilotflame.runtime.batching.simulator import (
    CallOutcome,
    DurationModel,
    SimulatedFunction,
    Simulator,
    poisson,
)
from report import Report
from warm_open import DEADLINES, LOADS

MAX_BATCH = 32
SIZES = (1, 2, 4, 8, 16, 32)
CURVES: Mapping[str, tuple[float, ...]] = {
    "minilm_cpu": (6.0, 9.0, 14.0, 23.0, 42.0, 77.0),
    "linear_4_10": tuple(4 + 10 * size for size in SIZES),
    "linear_10_3": tuple(10 + 3 * size for size in SIZES),
    "flat_20_05": tuple(20 + 0.5 * size for size in SIZES),
}
"""The milliseconds that batches of SIZES take. The first was measured; the others are a + b * size."""


def clairvoyant_share(arrivals_s: Sequence[float], durations_s: Sequence[float], timeout_s: float) -> float:
    """Return the largest share of arrivals that one worker can finish within `timeout_s` of their arrival.

    `durations_s[n]` is the duration of a batch of n. All deadlines are equally far away, so an optimal plan runs
    batches of consecutive arrivals, in order. The dynamic programme keeps, for the first k arrivals and each number
    of served ones, the earliest time at which the worker can be free again.
    """
    count = len(arrivals_s)
    free_s = np.full((count + 1, count + 1), np.inf)
    free_s[0, 0] = 0.0
    for last in range(1, count + 1):
        free_s[last] = free_s[last - 1]
        for size in range(1, min(len(durations_s) - 1, last) + 1):
            first_s, last_s = arrivals_s[last - size], arrivals_s[last - 1]
            if last_s + durations_s[size] > first_s + timeout_s:
                break
            ends_s = np.maximum(free_s[last - size], last_s) + durations_s[size]
            ends_s[ends_s > first_s + timeout_s] = np.inf
            np.minimum(free_s[last][size:], ends_s[: count + 1 - size], out=free_s[last][size:])
    return float(np.nonzero(np.isfinite(free_s[count]))[0].max()) / count


def policy_share(model: DurationModel, rate: float, count: int, timeout_s: float, seed: int) -> float:
    """Return the share of arrivals that the queue's policy answers in time."""
    simulator = Simulator(SimulatedFunction(model, max_batch=MAX_BATCH))
    run = simulator.run(poisson(rate, count, timeout_s=timeout_s, seed=seed))
    return sum(attempt.outcome is CallOutcome.ON_TIME for attempt in run.attempts) / count


def shares(curve_ms: Sequence[float], load: float, count: int, seed: int = 3) -> tuple[float, float]:
    """Return the policy's share and the clairvoyant one at a load, 1 being the largest throughput of the curve."""
    points = tuple((float(size), ms / 1e3) for size, ms in zip(SIZES, curve_ms, strict=True))
    assert all(low < high for low, high in pairwise(points))
    rate, timeout_s = load * max(size / s for size, s in points), DEADLINES * points[0][1]
    function, exact = SimulatedFunction(DurationModel(points)), DurationModel(points, noise=0.0)
    arrivals_s = [call.at_s for call in poisson(rate, count, seed=seed)]
    durations_s = [0.0] + [2 * function.transit_s + exact.mean_s(size) for size in range(1, MAX_BATCH + 1)]
    ideal = clairvoyant_share(arrivals_s, durations_s, timeout_s)
    return policy_share(function.durations, rate, count, timeout_s, seed), ideal


def main() -> int:
    parser = argparse.ArgumentParser(description="The queue's policy beside a clairvoyant one.")
    parser.add_argument("--count", type=int, default=2000, help="arrivals of each run")
    count: int = parser.parse_args().count
    report = Report("bench-clairvoyant")
    for name, curve_ms in CURVES.items():
        for load in LOADS:
            ours, ideal = shares(curve_ms, load, count)
            at = f"{name}_at_{str(load).replace('.', '_')}"
            report.add(f"{at}_on_time", ours)
            report.add(f"{at}_clairvoyant", ideal)
            report.add(f"{at}_of_clairvoyant", ours / ideal, "", ">= 0.9")
    return 0 if report.finish() else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The cost of the keep-alive policy, beside fixed timeouts and the offline optimum, on traces.

    python infra/bench/policy_bench.py [--seeds 1,2]

Each class of functions is replayed on four ladders at several prices of waiting. The cost of the policy includes its
learning. The timeout and its lowest rung are chosen in hindsight for the class, on the same arrivals. The report has a
row for each class, ladder and price.
"""

from __future__ import annotations

import multiprocessing
import operator
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from pilotflame.runtime.node.scaling.idle_distribution import SharedPrior
from pilotflame.runtime.node.scaling.ladder import Ladder, Rung
from pilotflame.runtime.node.scaling.ladder_simulator import LadderRun, Learned, Replay, run_together
from policy_replays import SERVICE_S, FloatArray, Totals, descend, optimum, timeouts
from policy_traces import classes
from report import Report, parser

# Dollars for a GB-second of host memory and of disk. A GPU costs 0.0008 dollars a second.
MEMORY, DISK = 3e-6, 3e-8
LADDERS: dict[str, tuple[Rung, ...]] = {
    "cpu": (Rung(0.45 * MEMORY, 0), Rung(0.1 * MEMORY, 0.03), Rung(0.1 * DISK, 5.8), Rung(0, 7)),
    "slice": (
        Rung(1e-4, 0), Rung(3.5 * MEMORY, 0.08), Rung(0.5 * MEMORY, 2.2), Rung(1.5 * DISK, 7), Rung(0, 12),
    ),
    "gpu": (
        Rung(8e-4, 0), Rung(18 * MEMORY, 0.4), Rung(1.0 * MEMORY, 5), Rung(16 * DISK, 12), Rung(0, 40),
    ),
    "gpu2": (Rung(8e-4, 0), Rung(16 * DISK, 12)),
}  # fmt: skip
TWO_RUNGS = "gpu2"
PRICES = (0.001, 0.01)
# The mixed fleet is compared at equal cost, at more prices.
EQUAL_COST_LADDERS, EQUAL_COST_PRICES = ("slice", "gpu2"), (0.0003, 0.001, 0.003, 0.01, 0.03)
# Drawn at random after the last change of the policy. Draw new ones after the next change: docs/scaling.md.
# Used up: 11 to 18, 901 to 912, 271828, 20261122, 42599668, 31725464 and 57301729.
SEEDS = (36674305, 42950217, 7620703)
TARGETS = {
    "mixed_waiting_at_equal_cost": "<= 0.4",
    "mixed_cold_at_equal_cost_two_rungs": "<= 0.7",
    "timer_cost_vs_best_fixed": "<= 0.3",
    "timer_cost_vs_best_fixed_two_rungs": "",
    "mean_vs_offline_optimum": "",
}


@dataclass(frozen=True)
class Outcome:
    """Ratios of our policy to others for one class on one ladder at one price. Above 1, ours is worse."""

    seed: int
    trace: str
    ladder: str
    price: float
    best_fixed: float
    """The cost, as a multiple of the cost of the best fixed timeout."""
    optimum: float
    """Cost, relative to the offline optimum without steps up."""
    waiting_at_equal_cost: float
    """The time that callers wait, as a multiple of that with the best fixed timeout of the same cost."""
    cold_at_equal_cost: float
    """The number of requests that wait, as a multiple of that with the best fixed timeout of the same cost."""


@dataclass(frozen=True)
class Task:
    """One class of one seed, on one ladder."""

    seed: int
    trace: str
    ladder: str

    @property
    def prices(self) -> tuple[float, ...]:
        equal = self.trace == "mixed" and self.ladder in EQUAL_COST_LADDERS
        return EQUAL_COST_PRICES if equal else PRICES

    def outcomes(self) -> list[Outcome]:
        functions, free = classes(self.seed)[self.trace], Ladder(LADDERS[self.ladder], 0.0)
        every = timeouts(free)
        fixed = reduce(Totals.__add__, [descend(arrivals, free, every) for arrivals in functions])
        best = np.sum([optimum(arrivals, free, self.prices)[0] for arrivals in functions], axis=0)
        return [
            self._outcome(price, functions, fixed, float(least_cost))
            for price, least_cost in zip(self.prices, best, strict=True)
        ]

    def _outcome(
        self, price: float, functions: Sequence[Sequence[float]], fixed: Totals, least_cost: float
    ) -> Outcome:
        whole = replay(functions, Ladder(LADDERS[self.ladder], price))
        cost = whole.bill(price)
        return Outcome(
            self.seed, self.trace, self.ladder, price, cost / fixed.bills(price).min(), cost / least_cost,
            whole.waited_s / least(fixed, whole.held, fixed.waited_s),
            whole.felt / least(fixed, whole.held, fixed.felt),
        )  # fmt: skip


def replay(functions: Sequence[Sequence[float]], ladder: Ladder) -> LadderRun:
    """Replay the functions of one node under our policy, and return their sum."""
    shared = SharedPrior()
    replays = [Replay(arrivals, SERVICE_S, ladder, Learned(ladder, shared)) for arrivals in functions]
    return reduce(operator.iadd, run_together(replays), LadderRun())


def least(fixed: Totals, held: float, figures: FloatArray) -> float:
    """Return the lowest figure of fixed timeouts that cost `held`, by interpolation between the best of them."""
    order = np.lexsort((figures, fixed.held))
    costs, reached = fixed.held[order], np.minimum.accumulate(figures[order])
    better = np.append(True, np.diff(reached) < 0)
    return max(1e-9, float(np.interp(held, costs[better], reached[better])))


def figures(outcomes: list[Outcome]) -> dict[str, float]:
    """Return the figures of one seed."""

    def of(trace: str, *ladders: str) -> list[Outcome]:
        return [one for one in outcomes if one.trace == trace and one.ladder in ladders]

    with_rungs = [name for name in LADDERS if name != TWO_RUNGS]
    return {
        "mixed_waiting_at_equal_cost": statistics.median(
            one.waiting_at_equal_cost for one in of("mixed", "slice")
        ),
        "mixed_cold_at_equal_cost_two_rungs": statistics.median(
            one.cold_at_equal_cost for one in of("mixed", TWO_RUNGS)
        ),
        "timer_cost_vs_best_fixed": max(one.best_fixed for one in of("timer", *with_rungs)),
        "timer_cost_vs_best_fixed_two_rungs": max(one.best_fixed for one in of("timer", TWO_RUNGS)),
        "mean_vs_offline_optimum": statistics.geometric_mean(one.optimum for one in outcomes),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--seeds", default=",".join(map(str, SEEDS)), help="one or more, with commas between"
    )
    arguments = options.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    names = list(classes(seeds[0]))
    # The longest first, so that all processes end at about the same time.
    names.sort(key=lambda name: (name != "mixed", not name.startswith("azure")))
    tasks = [Task(seed, trace, name) for trace in names for name in LADDERS for seed in seeds]
    with multiprocessing.get_context("fork").Pool() as pool:
        outcomes = [one for found in pool.imap_unordered(Task.outcomes, tasks, 1) for one in found]
    report = Report("bench-policy", packages=("numpy",))
    found = [figures([one for one in outcomes if one.seed == seed]) for seed in seeds]
    for name, target in TARGETS.items():
        values = [one[name] for one in found]
        report.add(name, max(values), f"worst of {len(seeds)} seeds, best {min(values):.3g}", target)
    for one in outcomes:
        report.row(**vars(one))
    report.note(f"seeds {arguments.seeds}")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

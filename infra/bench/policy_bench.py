"""What the keep-alive policy costs, beside fixed timeouts, the hybrid histogram and the offline optimum.

    python infra/bench/policy_bench.py [--seed 20261122]

Each class of traces is replayed on four ladders at two prices of waiting. Learning is part of every bill.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import policy_memory
from pilotflame.runtime.scaling.keep_alive_baselines import offline_optimum, own_best_ladder
from pilotflame.runtime.scaling.ladder import Ladder, Rung
from pilotflame.runtime.scaling.ladder_simulator import (
    Fixed,
    Habits,
    LadderRun,
    Learned,
    Replay,
    run,
    run_together,
)
from policy_baselines import SERVICE_S, fixed_timeouts, hybrids, replay_all, total
from policy_traces import classes
from report import Report

# Dollars per GB-second of host memory and of disk; a device costs 0.0008 dollars a second.
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
PRICES = (0.001, 0.01)
FIVE_PRICES = (0.0003, 0.001, 0.003, 0.01, 0.03)
WITHOUT_RUNGS = "gpu2"
# Few bursts are seen, and two rungs leave no middle way.
BURST_LIMIT = 1.25


@dataclass(frozen=True)
class Outcome:
    """The bills of one class on one ladder at one price, relative to ours: above 1, ours costs more."""

    trace: str
    ladder: str
    price: float
    bill: float
    best_fixed: float
    own_best: float
    envelope: float
    hybrid: float
    optimum: float
    optimum_climbing: float


def ours(functions: Sequence[Sequence[float]], ladder: Ladder) -> tuple[list[LadderRun], list[Learned]]:
    """Replay the functions of one node under our policy."""
    habits = Habits()
    policies = [Learned(ladder, habits) for _ in functions]
    replays = [
        Replay(arrivals, SERVICE_S, ladder, policy)
        for arrivals, policy in zip(functions, policies, strict=True)
    ]
    return run_together(replays), policies


def compare(task: tuple[str, str, int]) -> list[Outcome]:
    """Replay one class on one ladder at each price."""
    trace, name, seed = task
    functions = classes(seed)[trace]
    fixed = fixed_timeouts(functions, Ladder(LADDERS[name], 0.0))
    hybrid = hybrids(functions, Ladder(LADDERS[name], 0.0))
    outcomes = []
    for price in PRICES:
        ladder = Ladder(LADDERS[name], price)
        runs, policies = ours(functions, ladder)
        bill = total(runs).bill(price)
        costs = [policy.history.costs(ladder) for policy in policies]
        plans = [own_best_ladder(one, cost) for one, cost in zip(runs, costs, strict=True)]
        own = [
            run(Replay(arrivals, SERVICE_S, ladder, Fixed(plan)))
            for arrivals, plan in zip(functions, plans, strict=True)
        ]
        envelope = replay_all(functions, ladder, partial(Fixed, ladder.costs().envelope))
        pairs = list(zip(runs, costs, strict=True))
        outcomes.append(Outcome(
            trace, name, price, bill,
            bill / min(one.bill(price) for one in fixed), bill / total(own).bill(price),
            bill / total(envelope).bill(price), bill / min(one.bill(price) for one in hybrid),
            bill / sum(offline_optimum(one, cost, climbs=False) for one, cost in pairs),
            bill / sum(offline_optimum(one, cost, climbs=True) for one, cost in pairs),
        ))  # fmt: skip
    return outcomes


def at_equal_cost(task: tuple[str, str, int]) -> tuple[str, float, float]:
    """Return the medians over five prices: our waiting, and our woken periods, beside the best fixed timeout's."""
    trace, name, seed = task
    functions = classes(seed)[trace]
    fixed = fixed_timeouts(functions, Ladder(LADDERS[name], 0.0))
    waiting, cold = [], []
    for price in FIVE_PRICES:
        whole = total(ours(functions, Ladder(LADDERS[name], price))[0])
        waiting.append(whole.waited_s / least(fixed, whole.held, "waited_s"))
        cold.append(whole.woken / least(fixed, whole.held, "woken"))
    return name, statistics.median(waiting), statistics.median(cold)


def least(fixed: list[LadderRun], held: float, figure: str) -> float:
    """Return the least waiting, or the fewest woken periods, that fixed timeouts buy for `held`, by interpolation."""
    points = sorted((one.held, float(getattr(one, figure))) for one in fixed)
    best, previous = points[0][1], points[0]
    for point in points:
        if point[0] > held:
            share = (held - previous[0]) / (point[0] - previous[0]) if point[0] > previous[0] else 0.0
            return max(1e-9, min(best, previous[1] + max(0.0, share) * (min(point[1], best) - previous[1])))
        if point[1] <= best:
            best, previous = point[1], point
    return max(1e-9, best)


def enter(report: Report, outcomes: list[Outcome], equal: dict[str, tuple[float, float]]) -> None:
    report.add("mixed_waiting_at_equal_cost", equal["slice"][0], "of the best fixed timeout's", "<= 0.4")
    report.add(
        "mixed_cold_at_equal_cost_two_rungs", equal["gpu2"][1], "of the best fixed timeout's", "<= 0.7"
    )
    timers = [one for one in outcomes if one.trace == "timer"]
    ladders = [one.best_fixed for one in timers if one.ladder != WITHOUT_RUNGS]
    report.add("timer_bill_vs_best_fixed", max(ladders), "the worst of 3 ladders x 2 prices", "<= 0.4")
    report.add(
        "timer_bill_vs_best_fixed_two_rungs",
        max(one.best_fixed for one in timers if one.ladder == WITHOUT_RUNGS),
    )
    bursts = [one for one in outcomes if one.trace == "bursty" and one.ladder == WITHOUT_RUNGS]
    long_ones = [one for one in outcomes if one.trace not in ("azure", "mixed") and one not in bursts]
    report.add("worst_vs_own_best_ladder", max(one.own_best for one in long_ones), "", "<= 1.10")
    report.add(
        "bursts_two_rungs_vs_own_best_ladder", max(one.own_best for one in bursts), "", f"<= {BURST_LIMIT}"
    )
    report.add("worst_vs_envelope", max(one.envelope for one in outcomes), "", "<= 1.15")
    report.add("worst_vs_hybrid", max(one.hybrid for one in outcomes), "", "<= 1.10")
    for one in outcomes:
        report.row(**vars(one))


def show(outcomes: list[Outcome]) -> None:
    print(
        "bill of ours / bill of: the best fixed timeout for the class, each function's own best ladder, the envelope,"
    )
    print(
        "the hybrid histogram (the first three and it tuned in hindsight), the offline optimum without and with climbs"
    )
    print(
        f"{'trace':18}{'ladder':7}{'price':>6} {'fixed':>7}{'own':>7}{'envel.':>7}{'hybrid':>7}{'opt.':>7}{'climb':>8}"
    )
    for one in sorted(outcomes, key=lambda one: (one.trace, one.ladder, one.price)):
        gain = "" if one.own_best < 0.97 or one.best_fixed < 0.97 else "   nothing to gain"
        print(
            f"{one.trace:18}{one.ladder:7}{one.price:6} {one.best_fixed:7.2f}{one.own_best:7.2f}{one.envelope:7.2f}"
            f"{one.hybrid:7.2f}{one.optimum:7.2f}{one.optimum_climbing:8.1f}{gain}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seed", type=int, default=20261122, help="no constant of the policy was chosen by this one"
    )
    parser.add_argument("--only", default="", help="one class of traces")
    arguments = parser.parse_args()
    report = Report("bench-policy")
    started_s = time.monotonic()
    names = [arguments.only] if arguments.only else list(classes(arguments.seed))
    with multiprocessing.get_context("fork").Pool(2) as pool:
        equal = pool.map_async(
            at_equal_cost, [("mixed", name, arguments.seed) for name in ("slice", "gpu2")], 1
        )
        tasks = [(trace, name, arguments.seed) for trace in names for name in LADDERS]
        outcomes = [one for found in pool.imap_unordered(compare, tasks) for one in found]
        by_name = {name: (waiting, cold) for name, waiting, cold in equal.get()}
    show(outcomes)
    if not arguments.only:
        enter(report, outcomes, by_name)
        policy_memory.compare(report)
    report.note(f"seed {arguments.seed}; {time.monotonic() - started_s:.0f} s")
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

"""Stragglers: 2 % of the ranges are silent for 2 s, and what that does to the whole.

    python infra/bench/straggler.py [--quick] [--rounds N]

Two servers: one falls silent before the head of an answer, one in the middle of its body. Which ranges is drawn with a
seed, for each round anew. Each is set beside a clean run of the same round; the worse of the two counts.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from typing import Any

import checkpoint
import ours
from faulty import start_faulty
from lane import Lane
from percentiles import median
from report import Report

SHARE, STALL_S = 0.02, 2.0
CLEAN = "clean"
_FAULTS: dict[str, dict[str, Any]] = {
    CLEAN: {},
    "before the head": {"stall_share": SHARE, "stall_s": STALL_S},
    "in the body": {"stall_share": SHARE, "stall_s": STALL_S, "stall_at": 3 << 20},
}


def measure(report: Report, rounds: int, quick: bool = False) -> None:
    """Enters straggler_ratio. Plays twice the rounds, because a round without a drawn stall is left out."""
    data = checkpoint.checkpoint(checkpoint.QUICK if quick else checkpoint.FULL)
    seconds: dict[str, list[float]] = {name: [] for name in _FAULTS}
    stalls: dict[str, list[int]] = {name: [] for name in _FAULTS}
    with ExitStack() as stack:
        lanes = {}
        for name, faults in _FAULTS.items():
            url = stack.enter_context(start_faulty(data.folder.parent, faults))
            lanes[name] = stack.enter_context(
                Lane(name, "ours:Ours", recycled=True, **ours.given_at(url, data))
            )
            lanes[name].wait_ready()
        lanes[CLEAN].turn()
        for number in range(2 * rounds):
            for name in list(lanes) if number % 2 == 0 else list(lanes)[::-1]:
                told = lanes[name].turn()
                seconds[name].append(told["seconds"])
                stalls[name].append(told["stalls"])
            print(
                "  "
                + ", ".join(
                    f"{name} {seconds[name][-1]:.2f} s ({stalls[name][-1]} given up)" for name in lanes
                ),
                flush=True,
            )
    ratios = {name: _ratios(seconds[name], seconds[CLEAN], stalls[name]) for name in _FAULTS if name != CLEAN}
    for name in ratios:
        report.row(
            group="straggler", where=name, seconds=seconds[name], clean=seconds[CLEAN], stalls=stalls[name]
        )
    known = [found for found in ratios.values() if found]
    report.add(
        "straggler_ratio", max((median(found) for found in known), default=float("nan")), "x", "<= 1.15"
    )
    report.add("straggler_ratio_worst_round", max((max(found) for found in known), default=float("nan")), "x")
    report.add("straggler_given_up", sum(sum(found) for name, found in stalls.items() if name != CLEAN))
    report.add("straggler_clean_given_up", sum(stalls[CLEAN]))
    report.add("straggler_clean_s", median(seconds[CLEAN]), "s")


def _ratios(stalled: list[float], clean: list[float], stalls: list[int]) -> list[float]:
    rounds = zip(stalled, clean, stalls, strict=True)
    return [slow / fast for slow, fast, count in rounds if count or slow > STALL_S]


def main() -> int:
    parser = argparse.ArgumentParser(description="What stalled ranges cost.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    report = Report("bench-snapshot-straggler")
    measure(report, arguments.rounds or (2 if arguments.quick else 5), arguments.quick)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

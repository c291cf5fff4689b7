"""Nothing to tune: the defaults beside the best of a grid of part sizes and connections, on unlike sources.

    python infra/bench/tuning.py [--quick]

Sources: the fault server with round trips of 0, 5, 20 and 100 ms, with and without a cap on each connection. First every
cell of the grid is tried once, given up as soon as it cannot be the best any more; then the two best cells take turns
with the defaults. Medians count. The memory is kept, since fresh memory differs more than the cells do.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from itertools import product
from typing import Any

import checkpoint
import ours
from faulty import start_faulty
from lane import Lane
from percentiles import median
from report import Report
from rich.console import Console
from rich.table import Table

LATENCIES_S = (0.0, 0.005, 0.020, 0.100)
CAPS = (None, 60e6)
CONNECTIONS = (8, 16, 32, 4, 2)  # the likely ones first: they set the bound for the later ones
PARTS_MIB = (16, 4, 64)
HOPELESS = 1.1
FINALISTS, ROUNDS = 2, 3


@dataclass(frozen=True)
class Outcome:
    """One source's figures, in seconds."""

    source: str
    default_s: float
    best_s: float
    best: str
    connections: int

    @property
    def gap(self) -> float:
        return self.default_s / self.best_s - 1


def measure(report: Report, quick: bool = False) -> None:
    """Enters tuning_gap."""
    data = checkpoint.checkpoint(checkpoint.QUICK if quick else checkpoint.FULL)
    sources = list(product(LATENCIES_S[::3] if quick else LATENCIES_S, CAPS))
    outcomes = []
    for latency_s, cap in sources:
        faults = {"latency_s": latency_s, "bytes_per_s": cap}
        name = f"{latency_s * 1e3:.0f} ms" + (f", {cap / 1e6:.0f} MB/s each" if cap else "")
        with (
            start_faulty(data.folder.parent, faults) as url,
            Lane(name, "ours:Ours", recycled=True, **ours.given_at(url, data)) as lane,
        ):
            lane.wait_ready()
            outcomes.append(_source(name, lane))
        print(f"  {_line(outcomes[-1])}", flush=True)
    _enter(report, outcomes)


def _source(name: str, lane: Lane) -> Outcome:
    lane.turn()  # the first run of a lane, and of a server, pays for pages
    cells = _try_all(lane)
    finalists = sorted(cells, key=cells.__getitem__)[:FINALISTS]
    seconds: dict[Any, list[float]] = {}
    connections = 0
    for number in range(ROUNDS):
        turns: list[tuple[Any, dict[str, Any]]] = [("default", {})]
        turns += [(cell, _options(*cell)) for cell in finalists]
        for key, options in turns if number % 2 == 0 else turns[::-1]:
            told = lane.turn(**options)
            seconds.setdefault(key, []).append(told["seconds"])
            connections = told["connections"] if key == "default" else connections
    medians = {key: median(figures) for key, figures in seconds.items()}
    best = min(finalists, key=medians.__getitem__)
    shown = f"{best[0]} x {best[1]} MiB"
    return Outcome(name, medians["default"], medians[best], shown, connections)


def _try_all(lane: Lane) -> dict[tuple[int, int], float]:
    cells: dict[tuple[int, int], float] = {}
    for part_mib, connections in product(PARTS_MIB, CONNECTIONS):
        fastest_s = min(cells.values(), default=math.inf)
        limit: dict[str, Any] = {} if math.isinf(fastest_s) else {"limit_s": HOPELESS * fastest_s}
        cells[connections, part_mib] = lane.turn(**_options(connections, part_mib), **limit)["seconds"]
    return cells


def _options(connections: int, part_mib: int) -> dict[str, Any]:
    return {"connections": connections, "part_bytes": part_mib << 20}


def _line(outcome: Outcome) -> str:
    return (
        f"{outcome.source}: default {outcome.default_s:.2f} s ({outcome.connections} connections),"
        f" best of the grid {outcome.best_s:.2f} s ({outcome.best})"
    )


def _enter(report: Report, outcomes: list[Outcome]) -> None:
    table = Table(title="defaults beside the best of the grid", title_justify="left")
    for column in ("source", "default s", "best s", "best cell", "gap"):
        table.add_column(column, justify="left" if column in ("source", "best cell") else "right")
    for one in outcomes:
        table.add_row(one.source, f"{one.default_s:.2f}", f"{one.best_s:.2f}", one.best, f"{one.gap:+.0%}")
        report.row(group="tuning", gap=one.gap, **vars(one))
    Console(width=110).print(table)
    worst = max(outcomes, key=lambda one: one.gap)
    report.add("tuning_gap", worst.gap, "", "<= 0.15")
    report.add("tuning_gap_median", median([one.gap for one in outcomes]), "", "<= 0.1")
    report.note(f"tuning_gap: the worst was {_line(worst)}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Defaults beside a grid.")
    parser.add_argument("--quick", action="store_true", help="100 MB, and half of the sources")
    arguments = parser.parse_args()
    report = Report("bench-snapshot-tuning")
    measure(report, arguments.quick)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

"""The grid of settings that `make bench-warm` tries for each contestant, and the choice of the best setting.

    python infra/bench/warm_sweep.py [--peer NAME ...] [--handler NAME ...]

Each choice is alone on the machine and is measured at 8 and at 32 callers; the best geometric mean of the two wins, so
that no contestant is tuned for one number of callers. Kept in build/bench/bench-warm-grid.json until the machine or a version
differs. Ours has nothing to choose but the number of workers and of torch's threads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import signal
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import warm_alone
from load import load_apart
from rich.console import Console
from rich.table import Table
from servers import ServerError
from warm_peers import HERE, Choice, start

GRID = HERE.parents[1] / "build" / "bench" / "bench-warm-grid.json"
CALLERS = (8, 32)
_S = 1.5


def _litserve(handler: str) -> list[Choice]:
    """Wait 0 with a batch is left out: LitServe then spins on its queue."""
    one = Choice("litserve", batch=32, wait_ms=1, fast_queue=True)
    two = replace(one, workers=2)
    found = [one, replace(one, wait_ms=10), two, replace(two, wait_ms=10), replace(two, batch=8)]
    found += [replace(two, wait_ms=10, api_servers=2), replace(two, fast_queue=False)]
    return [*found, replace(one, threads=2)] if handler == "minilm" else found


def _bentoml(handler: str) -> list[Choice]:
    """BentoML refuses beyond its `wait`; it learns by itself how long to gather a batch."""
    one = Choice("bentoml", batch=32, wait_ms=10_000)
    two = replace(one, workers=2)
    found = [one, replace(one, batch=8), two, replace(two, batch=8)]
    return [*found, replace(one, threads=2)] if handler == "minilm" else found


def _ray(handler: str) -> list[Choice]:
    """`haproxy`: HAProxy in front and Ray's throughput options; without it, the default proxy."""
    one = Choice("ray", batch=32, wait_ms=10, way="haproxy")
    two = replace(one, workers=2)
    found = [one, replace(one, wait_ms=0), two, replace(two, wait_ms=0), replace(two, batch=8)]
    found += [replace(two, way="")]
    return [*found, replace(one, threads=2)] if handler == "minilm" else found


def _pilotflame(handler: str) -> list[Choice]:
    one = Choice("pilotflame")
    found = [one, replace(one, workers=2)]
    return [*found, replace(one, threads=2)] if handler == "minilm" else found


CHOICES = {"pilotflame": _pilotflame, "litserve": _litserve, "bentoml": _bentoml, "ray": _ray}


@dataclass(frozen=True)
class Point:
    """One choice on one handler: answers per second for each number of callers."""

    handler: str
    choice: Choice
    per_second: dict[int, float]
    problem: str = ""

    @property
    def score(self) -> float:
        """The geometric mean."""
        rates = list(self.per_second.values())
        return math.exp(sum(math.log(max(rate, 1e-9)) for rate in rates) / len(rates)) if rates else 0.0

    def to_wire(self) -> dict[str, Any]:
        return {
            "handler": self.handler,
            "choice": asdict(self.choice),
            "per_second": self.per_second,
            "problem": self.problem,
        }

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> Point:
        rates = {int(callers): rate for callers, rate in wire["per_second"].items()}
        return Point(wire["handler"], Choice(**wire["choice"]), rates, wire["problem"])


def measure(choice: Choice, handler: str) -> Point:
    """One choice. A contestant that cannot be started with it, or answers wrongly, has a problem and no score."""
    rates: dict[int, float] = {}
    try:
        with start(choice, handler) as contender:
            contender.warm_up()
            for callers in CALLERS:
                tally = load_apart(contender.request, callers=callers, duration_s=_S, warmup_s=0.5)
                if tally.right < 0.99 * tally.answers or tally.errors:
                    return Point(handler, choice, {}, f"{callers} callers: {tally.statuses} {tally.errors}")
                rates[callers] = tally.per_second
    except ServerError as error:
        return Point(handler, choice, {}, str(error)[-300:])
    return Point(handler, choice, rates)


class Grid:
    """The measured points of each contestant with each handler on this machine."""

    def __init__(self) -> None:
        self._of = _machine()
        self.points: dict[str, list[Point]] = {}
        if GRID.is_file():
            kept = json.loads(GRID.read_text())
            if kept["of"] == self._of:
                self.points = {
                    key: [Point.from_wire(wire) for wire in points] for key, points in kept["points"].items()
                }

    def sweep(self, name: str, handler: str) -> None:
        """Measure every choice of one contestant, print as it goes, and keep it."""
        found: list[Point] = []
        for choice in CHOICES[name](handler):
            found.append(measure(choice, handler))
            print(f"  {handler}, {name}, {choice}: {_told(found[-1])}", flush=True)
        self.points[f"{handler} {name}"] = found
        GRID.parent.mkdir(parents=True, exist_ok=True)
        wires = {key: [point.to_wire() for point in points] for key, points in self.points.items()}
        GRID.write_text(json.dumps({"of": self._of, "points": wires}, indent=1) + "\n")

    def best(self, name: str, handler: str, workers: int | None = None) -> Choice:
        """Return the best measured choice, with `workers` workers if given. Sweep first if this has not been done."""
        if f"{handler} {name}" not in self.points:
            self.sweep(name, handler)
        points = self.points[f"{handler} {name}"]
        points = [point for point in points if workers in (None, point.choice.workers)]
        best = max(points, key=lambda point: point.score)
        if not best.per_second:
            raise ServerError(f"no choice of {name} works for {handler}: {best.problem}")
        return best.choice

    def print(self) -> None:
        """Every choice, the chosen ones marked."""
        for key, points in self.points.items():
            table = Table(title=f"settings of {key}: answers/s", title_justify="left")
            for column in ("choice", *(f"{callers} callers" for callers in CALLERS), "geometric mean", ""):
                table.add_column(column, justify="left" if column == "choice" else "right")
            best = max(points, key=lambda point: point.score)
            for point in points:
                rates = [f"{rate:.0f}" for rate in point.per_second.values()] or ["-"] * len(CALLERS)
                table.add_row(
                    str(point.choice),
                    *rates,
                    f"{point.score:.0f}",
                    "*" if point is best else point.problem[:40],
                )
            Console(width=120).print(table)


def _told(point: Point) -> str:
    return point.problem or ", ".join(
        f"{rate:.0f}/s at {callers}" for callers, rate in point.per_second.items()
    )


def _machine() -> dict[str, Any]:
    pins = [(HERE / "peers" / f"{name}.txt").read_text() for name in ("bentoml", "ray")]
    peers = [line for text in pins for line in text.splitlines() if line.startswith(("bentoml==", "ray=="))]
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": [*peers, f"litserve=={importlib.metadata.version('litserve')}"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Which settings are each contestant's best.")
    parser.add_argument("--peer", nargs="+", choices=sorted(CHOICES), default=list(CHOICES))
    parser.add_argument("--handler", nargs="+", choices=["minilm", "sleep"], default=["minilm", "sleep"])
    arguments = parser.parse_args()
    warm_alone.enter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    grid = Grid()
    for handler in arguments.handler:
        for name in arguments.peer:
            grid.sweep(name, handler)
    grid.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

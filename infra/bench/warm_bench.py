"""`make bench-warm`: the warm path beside LitServe, BentoML and Ray Serve, each at its own best settings.

    python infra/bench/warm_bench.py [--only PART ...] [--rounds N] [--quick] [--sweep] [--peers NAME ...]

Parts: minilm and sleep (closed and open loops), overload (the sleep curve at 1.2 of capacity, and retries), tenants,
streams, echo, replay. The settings are swept first where build/bench/bench-warm-grid.json does not have them for this
machine (about 8 minutes), or with --sweep. Writes build/bench/bench-warm.json.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys

import replay
import warm_alone
import warm_closed
import warm_echo
import warm_envs
import warm_open
import warm_streams
import warm_tenants
from percentiles import median
from report import Report
from warm_bare import bare
from warm_closed import OURS, Plan
from warm_field import field
from warm_peers import HERE, LIMIT, Choice
from warm_sweep import CHOICES, Grid

PARTS = ("minilm", "sleep", "overload", "tenants", "streams", "echo", "replay")


class Bench:
    """One run: the measurements to make, the contestants, and the report."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.report = Report("bench-warm", packages=("torch", "transformers", "litserve"))
        self._only: list[str] = arguments.only
        plan = Plan.quick() if arguments.quick else Plan()
        self._plan = Plan(arguments.rounds or plan.rounds, plan.each_s, plan.warm_s, plan.open_s)
        self._quick = bool(arguments.quick)
        self._names = [OURS, *(name for name in arguments.peers if name != OURS)]
        self._grid = Grid()
        if arguments.sweep:
            for handler in ("minilm", "sleep"):
                for name in self._names:
                    self._grid.sweep(name, handler)

    def run(self) -> bool:
        """Run every requested part. Return whether all targets were met."""
        try:
            for part in PARTS:
                if part in self._only:
                    with self.report.part(part):
                        getattr(self, f"_{part}")()
        finally:  # an interrupted run keeps the figures that it has measured
            self._grid.print()
            met = self.report.finish()
        return met

    def _choices(self, handler: str, workers: int | None = None) -> dict[str, Choice]:
        chosen = {name: self._grid.best(name, handler, workers) for name in self._names}
        for name, choice in chosen.items():
            self.report.note(f"{handler}{f', {workers} worker' if workers else ''}: {name} with {choice}")
        return chosen

    def _minilm(self) -> None:
        """Both loops with the same servers. Capacity is the rate of the bare model in the same number of processes."""
        choices = self._choices("minilm")
        closed = warm_closed.Closed("minilm", self.report)
        with bare("minilm", choices[OURS]) as floor, field("minilm", choices, self.report) as entered:
            closed.run(entered, floor, self._plan)
            closed.enter(entered)
            opened = warm_open.Open("minilm", self.report, median(closed.bare_rates), median(closed.alone_s))
            opened.run(entered, self._plan)
            opened.enter(entered)

    def _sleep(self) -> None:
        """The closed loop, each at its best."""
        choices = self._choices("sleep")
        closed = warm_closed.Closed("sleep", self.report)
        with bare("sleep", choices[OURS]) as floor, field("sleep", choices, self.report) as entered:
            closed.run(entered, floor, self._plan)
            closed.enter(entered)

    def _overload(self) -> None:
        """The open loop on the sleep curve, with one worker each: as one device would be."""
        choices = self._choices("sleep", workers=1)
        capacity, alone_s = self._sleep_curve()
        with field("sleep", choices, self.report) as entered:
            opened = warm_open.Open("sleep", self.report, capacity, alone_s)
            opened.run(entered, self._plan)
            opened.enter(entered)
            opened.enter_overload()
            opened.retry(entered[OURS], self._plan)

    def _tenants(self) -> None:
        warm_tenants.measure(self.report, self._sleep_curve()[0], 5.0 if self._quick else warm_tenants.FOR_S)

    def _streams(self) -> None:
        warm_streams.measure(self.report, 1.0 if self._quick else 2.0)

    def _echo(self) -> None:
        warm_echo.measure(self.report, 3 if self._quick else 5)

    def _replay(self) -> None:
        replay.enter(self.report, 5.0 if self._quick else 20.0)

    def _sleep_curve(self) -> tuple[float, float]:
        """Return the highest rate of one worker, and the time of a batch of one. Both follow from the known curve."""
        sys.path.insert(0, str(HERE / "functions" / "sleep"))
        import curve  # noqa: PLC0415

        return LIMIT / curve.seconds(LIMIT), curve.seconds(1)


def main() -> int:
    parser = argparse.ArgumentParser(description="The warm path beside LitServe, BentoML and Ray Serve.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peers", nargs="*", choices=sorted(CHOICES), default=list(CHOICES))
    parser.add_argument("--rounds", type=int, help="of the closed loops")
    parser.add_argument("--quick", action="store_true", help="one short round of everything")
    parser.add_argument("--sweep", action="store_true", help="try every choice of settings again")
    arguments = parser.parse_args()
    for name in set(arguments.peers) & set(warm_envs.NAMES):
        warm_envs.ready(name)
    warm_alone.enter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return 0 if Bench(arguments).run() else 1


if __name__ == "__main__":
    sys.exit(main())

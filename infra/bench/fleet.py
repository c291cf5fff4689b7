"""The cost of a function among few and among many: starts, calls, deploys, and the gateway's memory.

    python infra/bench/fleet.py [--functions 10 100 1000] [--rounds 20]

Each size has a gateway of its own, with functions that do nothing. The sizes take turns in every round, so that other
work on the machine meets all of them. Ratios compare the largest size with the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memory
from control import WAIT_S, Control
from http1 import Request
from opened import OpenLoop
from percentiles import median, percentile
from report import Report
from servers import Server, start_pilotflame

SIZES = [10, 100, 1000]
HANDLER = "def handler(event):\n    return event\n"
CALLS = 10
"""Cold starts, and deploys, of each fleet in a round."""
WARM_CALLS = 50
BURSTS, DEPLOY_ROUNDS = 3, 3
# The functions of the largest fleet hold more than the default of rest_mb, and none may lose its zygote. The calls come
# in the same order in each round, so the gateway would learn which function is next, and start its worker.
ENVIRONMENT = {"PILOTFLAME_REST_MB": "100000", "PILOTFLAME_LEARN_UPSTREAMS": "false"}
SETTINGS: dict[str, Any] = {"threads": 1, "scale.max": 1, "scale.idle_timeout_s": 0.3}
IDLE_S = 20.0
# Memory is measured SETTLE_S after the last start (runtime/functions/rest.py). Only then is a gateway idle.
SETTLE_S = 8.0


@dataclass
class Fleet:
    """A gateway with functions that do nothing, and what was measured of it."""

    size: int
    server: Server
    control: Control
    code: str
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    cold_cpu_ms: list[float] = field(default_factory=list)
    deploy_cpu_ms: list[float] = field(default_factory=list)
    starts_per_s: list[float] = field(default_factory=list)
    gateway_mb: float = 0.0
    idle_share: float = 0.0

    @property
    def names(self) -> list[str]:
        return [f"f{number}" for number in range(self.size)]

    def some(self, turn: int) -> list[str]:
        """Return the functions that are called or deployed in this turn."""
        return [self.names[(turn * CALLS + number) % self.size] for number in range(min(CALLS, self.size))]

    def deploy(self, names: Sequence[str]) -> None:
        self.reconnect()
        for name in names:
            self.control.deploy(self.code, name=name, **SETTINGS)
            # A light function that is not called after its deploy loses its zygote.
            self.control.invoke(name, {})

    def reconnect(self) -> None:
        """Open a new connection at the next request: the gateway may have closed this one while others had their turn."""
        self.control.close()

    def wait_at_zero(self) -> None:
        """Wait until each function has a standby and no worker."""
        self.reconnect()
        deadline = time.monotonic() + WAIT_S
        while not all(map(_at_zero, self.control.request("GET", "/v1/functions")["functions"])):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the fleet of {self.size} did not come to zero within {WAIT_S:.0f} s")
            time.sleep(0.5)

    def call(self, name: str) -> None:
        """Call a function at zero."""
        self.control.wait_for(name, workers=0, standby=True)
        reply = self.control.invoke(name, {})
        if not reply.cold:
            raise RuntimeError(f"{name} was not at zero")
        self.cold_ms.append(reply.ms)

    @contextmanager
    def cpu_ms(self, figures: list[float], count: int) -> Iterator[None]:
        """Append the CPU time of all its processes inside the block, divided by `count`."""
        before_s = self.server.cpu_s()
        yield
        self.wait_at_zero()
        figures.append((self.server.cpu_s() - before_s) * 1e3 / count)

    def burst(self) -> None:
        """Call all functions at one instant, all of which are at zero."""
        headers = {"Content-Type": "application/json"}
        requests = [
            Request(f"{self.server.url}/invoke/{name}", body=b"{}", headers=headers) for name in self.names
        ]
        tally = asyncio.run(_Each(requests).run([0] * self.size, self.size, 120.0))
        if not tally.clean or tally.right != self.size:
            raise RuntimeError(f"{tally.right} of {self.size} answered; {tally.statuses} {tally.errors}")
        self.starts_per_s.append(self.size / tally.wall_s)
        self.wait_at_zero()


class _Each(OpenLoop):
    """An open loop that sends each request once."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(requests[0], len(requests))
        self._wires = iter([request.encode() for request in requests])

    def _wire_of(self, _intended_ns: int) -> bytes:
        return next(self._wires)


def _at_zero(status: dict[str, Any]) -> bool:
    return bool(status["standby"]) and not any(status["workers"].values())


@contextmanager
def fleets(sizes: Sequence[int]) -> Iterator[list[Fleet]]:
    """A gateway of each size, all of its functions deployed and at zero."""
    with contextlib.ExitStack() as stack:
        code = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotflame-fleet-")))
        (code / "handler.py").write_text(HANDLER)
        found = []
        for size in sizes:
            server = stack.enter_context(start_pilotflame(ENVIRONMENT))
            control = stack.enter_context(contextlib.closing(Control(server.url)))
            found.append(Fleet(size, server, control, str(code)))
            print(f"{size} functions …", flush=True)
            found[-1].deploy(found[-1].names)
            found[-1].wait_at_zero()
        yield found


def play(entered: Sequence[Fleet], rounds: int) -> None:
    """Measure all but what grows with the time that a gateway runs."""
    for turn, fleet in itertools.product(range(DEPLOY_ROUNDS), entered):
        with fleet.cpu_ms(fleet.deploy_cpu_ms, len(fleet.some(turn))):
            fleet.deploy(fleet.some(turn))
    for turn in range(rounds):
        for fleet in entered:
            fleet.reconnect()
        for number, fleet in itertools.product(range(CALLS), entered):
            fleet.call(fleet.some(turn)[number % fleet.size])
        for fleet in entered:
            name = fleet.some(turn)[-1]
            fleet.control.invoke(name, {})
            fleet.warm_ms += [fleet.control.invoke(name, {}).ms for _ in range(WARM_CALLS)]
    for _, fleet in itertools.product(range(BURSTS), entered):
        with fleet.cpu_ms(fleet.cold_cpu_ms, fleet.size):
            fleet.burst()
    for fleet in entered:
        fleet.gateway_mb = memory.held(fleet.server.pid).rss_mb


def rest(entered: Sequence[Fleet]) -> None:
    """Measure the CPU time of the idle gateways."""
    time.sleep(SETTLE_S)
    before_s = [fleet.server.cpu_s() for fleet in entered]
    time.sleep(IDLE_S)
    for fleet, used_s in zip(entered, before_s, strict=True):
        fleet.idle_share = (fleet.server.cpu_s() - used_s) / IDLE_S


def enter(report: Report, few: Fleet, many: Fleet) -> None:
    """Enter the ratios, and what is bounded by itself."""
    p50, p99 = ([percentile(fleet.cold_ms, share) for fleet in (few, many)] for share in (0.5, 0.99))
    report.add("cold_p50_ratio", p50[1] / p50[0], "x", "<= 1.2")
    report.add("cold_p99_ratio", p99[1] / p99[0], "x", "<= 2")
    report.add("warm_p50_ratio", median(many.warm_ms) / median(few.warm_ms), "x", "<= 1.1")
    report.add("burst_starts_per_s", median(many.starts_per_s), "/s", ">= 200")
    report.add("deploy_cpu_ratio", median(many.deploy_cpu_ms) / median(few.deploy_cpu_ms), "x", "<= 1.2")
    added_kb = (many.gateway_mb - few.gateway_mb) * 1e3 / max(1, many.size - few.size)
    report.add("gateway_kb_per_function", added_kb, "KB", "<= 150")
    report.add("idle_cpu_share", many.idle_share, "of a core", "<= 0.002")


def row(fleet: Fleet) -> dict[str, Any]:
    return {
        "functions": fleet.size,
        "cold_p50_ms": percentile(fleet.cold_ms, 0.5), "cold_p99_ms": percentile(fleet.cold_ms, 0.99),
        "warm_p50_ms": median(fleet.warm_ms), "starts_per_s": median(fleet.starts_per_s),
        "start_cpu_ms": median(fleet.cold_cpu_ms), "deploy_cpu_ms": median(fleet.deploy_cpu_ms),
        "gateway_mb": fleet.gateway_mb, "idle_cpu_share": fleet.idle_share,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    report = Report("bench-fleet")
    with fleets(sorted(arguments.functions)) as entered:
        play(entered, arguments.rounds)
        rest(entered)
        for fleet in entered:
            report.row(**row(fleet))
            print("  " + ", ".join(f"{name} {value:.4g}" for name, value in row(fleet).items()), flush=True)
        enter(report, entered[0], entered[-1])
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

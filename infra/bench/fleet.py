"""The cost of a function among few and among many: starts, calls, deploys, and the gateway's memory.

    python infra/bench/fleet.py [--functions 10 100 1000] [--rounds 20] [--model]

Each size has a gateway of its own, with functions that do nothing, or with sentence embeddings by one model. The sizes take turns in every round, so that other
work on the machine meets all of them. Ratios compare the largest size with the smallest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
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
from pilotflame.runtime.commands import minilm
from report import Report
from servers import Server, start_pilotflame

SIZES = [10, 100, 1000]
JSON = {"Content-Type": "application/json"}
HANDLER = "def handler(event):\n    return event\n"
TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "text-embedding"
CALLS = 10
"""Cold starts, and deploys, of each fleet in a round."""
WARM_CALLS = 50
BURSTS, DEPLOY_ROUNDS = 3, 3
# The functions of the largest fleet hold more than the default of rest_mb, and none may lose its zygote. The calls come
# in the same order in each round, so the gateway would learn which function is next, and start its worker.
ENVIRONMENT = {"PILOTFLAME_REST_MB": "100000", "PILOTFLAME_LEARN_UPSTREAMS": "false"}
SETTINGS: dict[str, Any] = {"threads": 1, "scale.max": 1, "scale.idle_timeout_s": 0.3}
RATIOS = {"cold_p50_ms": 1.2, "cold_p99_ms": 2, "warm_p50_ms": 1.1, "deploy_cpu_ms": 1.2}
# The accounts are written once a minute.
IDLE_S = 60.0
# After the last start, the memory of all processes is measured (runtime/functions/node_memory.py): once more, and that
# takes at most 2 % of a core. Only then is a gateway idle.
SETTLE_S = 60.0
# Standbys are forked, and workers end, after the cold starts.
QUIET_S = 1.0


@dataclass(frozen=True)
class Code:
    """The code of the functions of a fleet, and the event of each call."""

    folder: Path
    event: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


@dataclass
class Fleet:
    """A gateway with functions that have the same code, and what was measured of it.

    A gateway closes connections that are idle for long, so each turn begins with `control.close()` and a new one.
    """

    size: int
    server: Server
    control: Control
    code: Code
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    start_cpu_ms: list[float] = field(default_factory=list)
    deploy_cpu_ms: list[float] = field(default_factory=list)
    starts_per_s: list[float] = field(default_factory=list)
    gateway_mb: float = 0.0
    idle_share: float = 0.0

    def __post_init__(self) -> None:
        self.names = [f"f{number}" for number in range(self.size)]

    def some(self, turn: int) -> list[str]:
        """Return the functions that are called or deployed in this turn."""
        return [self.names[(turn * CALLS + number) % self.size] for number in range(min(CALLS, self.size))]

    def deploy(self, names: Sequence[str]) -> None:
        """Deploy functions, and call each of them once."""
        self.control.close()
        for name in names:
            self.control.deploy(str(self.code.folder), name=name, **SETTINGS, **self.code.settings)
            # Otherwise it loses its zygote after a while (runtime/functions/rest.py).
            self.control.invoke(name, self.code.event)

    def wait_at_zero(self) -> None:
        """Wait until each function has a standby and no worker."""
        self.control.close()
        deadline = time.monotonic() + WAIT_S
        while not all(map(_at_zero, self.control.request("GET", "/v1/functions")["functions"])):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the fleet of {self.size} did not come to zero within {WAIT_S:.0f} s")
            time.sleep(0.5)

    def call(self, name: str) -> None:
        """Call a function at zero."""
        self.control.wait_for(name, workers=0, standby=True)
        reply = self.control.invoke(name, self.code.event)
        if not reply.cold:
            raise RuntimeError(f"{name} was not at zero")
        self.cold_ms.append(reply.ms)

    @contextmanager
    def cpu_ms(self, figures: list[float], names: Sequence[str]) -> Iterator[None]:
        """Append the CPU time of all its processes inside the block, for each function, until these are at zero."""
        before_s = self.server.cpu_s()
        yield
        for name in names:
            # Not all of them: a list of the largest fleet takes more than a deploy.
            self.control.wait_for(name, workers=0, standby=True)
        figures.append((self.server.cpu_s() - before_s) * 1e3 / len(names))

    def burst(self) -> None:
        """Call all functions at one instant, all of which are at zero."""
        urls = [f"{self.server.url}/invoke/{name}" for name in self.names]
        body = json.dumps(self.code.event).encode()
        requests = [Request(url, body=body, headers=JSON) for url in urls]
        tally = asyncio.run(_Each(requests).run([0] * self.size, self.size, 120.0))
        if not tally.clean or tally.right != self.size:
            raise RuntimeError(f"{tally.right} of {self.size} answered; {tally.statuses} {tally.errors}")
        self.starts_per_s.append(self.size / tally.wall_s)

    def figures(self) -> dict[str, float]:
        """Return what was measured: medians, and percentiles of the cold starts."""
        return {
            "functions": self.size,
            "cold_p50_ms": percentile(self.cold_ms, 0.5), "cold_p99_ms": percentile(self.cold_ms, 0.99),
            "warm_p50_ms": median(self.warm_ms), "starts_per_s": median(self.starts_per_s),
            "start_cpu_ms": median(self.start_cpu_ms), "deploy_cpu_ms": median(self.deploy_cpu_ms),
            "gateway_mb": self.gateway_mb, "idle_cpu_share": self.idle_share,
        }  # fmt: skip


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
def nothing() -> Iterator[Code]:
    """A handler that returns its event."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-fleet-") as folder:
        (Path(folder) / "handler.py").write_text(HANDLER)
        yield Code(Path(folder))


@contextmanager
def embeddings() -> Iterator[Code]:
    """The template of sentence embeddings with all-MiniLM-L6-v2, whose 90 MB of weights all functions map."""
    event, settings = {"text": minilm.TEXT}, {"snapshot": str(minilm.model_folder())}
    yield Code(TEMPLATE, event, settings, minilm.OFFLINE)


@contextmanager
def fleets(sizes: Sequence[int], code: Code) -> Iterator[list[Fleet]]:
    """A gateway of each size, all of its functions deployed and at zero."""
    with contextlib.ExitStack() as stack:
        found = []
        for size in sizes:
            server = stack.enter_context(start_pilotflame({**ENVIRONMENT, **code.environment}))
            control = stack.enter_context(contextlib.closing(Control(server.url)))
            found.append(Fleet(size, server, control, code))
            print(f"{size} functions …", flush=True)
            found[-1].deploy(found[-1].names)
            found[-1].wait_at_zero()
        yield found


def play(entered: Sequence[Fleet], rounds: int) -> None:
    """Measure the deploys, the calls and the bursts, and then the gateways at rest."""
    for turn, fleet in itertools.product(range(DEPLOY_ROUNDS), entered):
        with fleet.cpu_ms(fleet.deploy_cpu_ms, fleet.some(turn)):
            fleet.deploy(fleet.some(turn))
    for turn in range(rounds):
        for fleet in entered:
            fleet.control.close()
        for number, fleet in itertools.product(range(CALLS), entered):
            fleet.call(fleet.some(turn)[number % fleet.size])
        time.sleep(QUIET_S)
        for fleet in entered:
            name = fleet.some(turn)[-1]
            fleet.control.invoke(name, fleet.code.event)
            fleet.warm_ms += [fleet.control.invoke(name, fleet.code.event).ms for _ in range(WARM_CALLS)]
    for _, fleet in itertools.product(range(BURSTS), entered):
        with fleet.cpu_ms(fleet.start_cpu_ms, fleet.names):
            fleet.burst()
    time.sleep(SETTLE_S)
    before_s = [fleet.server.cpu_s() for fleet in entered]
    time.sleep(IDLE_S)
    for fleet, used_s in zip(entered, before_s, strict=True):
        fleet.idle_share = (fleet.server.cpu_s() - used_s) / IDLE_S
        fleet.gateway_mb = memory.held(fleet.server.pid).rss_mb


def enter(report: Report, few: dict[str, float], many: dict[str, float]) -> None:
    """Enter the targets: ratios of many functions to few, and figures with a bound of their own."""
    for name, most in RATIOS.items():
        report.add(f"{name}_ratio", many[name] / few[name], "x", f"<= {most}")
    report.add("starts_per_s", many["starts_per_s"], "/s", ">= 200")
    added_kb = (many["gateway_mb"] - few["gateway_mb"]) * 1e3 / max(1, many["functions"] - few["functions"])
    report.add("gateway_kb_per_function", added_kb, "KB", "<= 150")
    report.add("idle_cpu_share", many["idle_cpu_share"], "of a core", "<= 0.002")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--model", action="store_true", help="functions with a real model, which needs the extra demo"
    )
    arguments = parser.parse_args()
    report = Report("bench-fleet")
    with (
        (embeddings if arguments.model else nothing)() as code,
        fleets(sorted(arguments.functions), code) as entered,
    ):
        play(entered, arguments.rounds)
        rows = [fleet.figures() for fleet in entered]
    for row in rows:
        report.row(**row)
        print("  " + ", ".join(f"{name} {value:.4g}" for name, value in row.items()), flush=True)
    enter(report, rows[0], rows[-1])
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

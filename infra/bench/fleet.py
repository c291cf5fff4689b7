"""The cost of a function among few and among many: starts, calls, deploys, the gateway's memory, and answers about all functions.

    python infra/bench/fleet.py [--functions 10 100 1000] [--rounds 20]

Each size has a gateway of its own, with functions that do nothing. The sizes take turns in every round, so that other
work on the machine affects all of them. Ratios compare the largest size with the smallest.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from control import WAIT_S, Control, gateway
from load import Request, burst
from percentiles import median, percentile
from report import Report, parser
from servers import Server

HANDLER = "def handler(event):\n    return event\n"
CALLS = 10
"""Cold starts, and deploys, of each fleet in a round."""
WARM_CALLS = 50
BURSTS, DEPLOY_ROUNDS = 3, 3
# No function of the largest fleet may lose its zygote, which the default of rest_mb would do. The calls come in the same
# order in each round, so the gateway would learn which function is next, and start its worker.
ENVIRONMENT = {"PILOTFLAME_REST_MB": "100000", "PILOTFLAME_LEARN_UPSTREAMS": "false"}
SETTINGS: dict[str, Any] = {"threads": 1, "scale.max": 1, "scale.idle_timeout_s": 0.3}
RATIOS = {"cold_p50_ms": 1.2, "cold_p99_ms": 2, "warm_p50_ms": 1.1, "deploy_cpu_ms": 1.2}
# The accounts are written once a minute.
IDLE_S = 60.0
# After the last start, the memory of all processes is measured once more (runtime/measuring/node_memory.py).
SETTLE_S = 60.0
# Standbys are forked, and workers end, after the cold starts.
QUIET_S = 1.0
# The answers that grow with the number of functions, and how often each is read.
GROWING = ("/metrics", "/v1/functions", "/v1/console", "/openapi.json")
READS = 9


@dataclass
class Fleet:
    """A gateway with functions that have the same code, and what was measured of it.

    A gateway closes connections that are idle for long, so each turn begins with `control.close()` and a new one.
    """

    size: int
    server: Server
    control: Control
    cold_ms: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    deploy_cpu_ms: list[float] = field(default_factory=list)
    starts_per_s: list[float] = field(default_factory=list)
    gateway_mb: float = 0.0
    idle_share: float = 0.0
    stalls_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = [f"f{number}" for number in range(self.size)]

    def some(self, turn: int) -> list[str]:
        """Return the functions that are called or deployed in this turn."""
        return [self.names[(turn * CALLS + number) % self.size] for number in range(min(CALLS, self.size))]

    def deploy(self, names: Sequence[str]) -> None:
        """Deploy functions, and call each of them once, because only called functions keep their zygotes."""
        self.control.close()
        for name in names:
            self.control.deploy_code(name, HANDLER, **SETTINGS)
            self.control.invoke(name, {})

    def wait_at_zero(self) -> None:
        """Wait until each function has a standby and no worker."""
        self.control.close()
        deadline = time.monotonic() + WAIT_S
        while not all(map(_at_zero, self.control.request("GET", "/v1/functions")["functions"])):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the fleet of {self.size} did not come to zero within {WAIT_S:.0f} s")
            time.sleep(0.5)

    def deploy_again(self, turn: int) -> None:
        """Deploy some functions again, and append the CPU time of all processes for each of them."""
        before_s, names = self.server.cpu_s(), self.some(turn)
        self.deploy(names)
        for name in names:
            # Not `wait_at_zero`: listing the largest fleet takes more CPU time than a deploy.
            self.control.wait_for(name, workers=0, standby=True)
        self.deploy_cpu_ms.append((self.server.cpu_s() - before_s) * 1e3 / len(names))

    def call(self, name: str) -> None:
        """Call a function at zero."""
        self.control.wait_for(name, workers=0, standby=True)
        reply = self.control.invoke(name, {})
        if not reply.cold:
            raise RuntimeError(f"{name} was not at zero")
        self.cold_ms.append(reply.ms)

    def call_warm(self, name: str) -> None:
        self.control.invoke(name, {})
        self.warm_ms += [self.control.invoke(name, {}).ms for _ in range(WARM_CALLS)]

    def burst(self) -> None:
        """Call all functions at one instant, all of which are at zero."""
        self.wait_at_zero()
        urls = [f"{self.server.url}/invoke/{name}" for name in self.names]
        tally = burst([Request(url, body=b"{}") for url in urls])
        self.starts_per_s.append(self.size / tally.wall_s)

    def read_growing(self) -> None:
        """Note for how long the gateway answered nothing else while it made each of GROWING: the median of READS times."""
        self.control.close()
        with ThreadPoolExecutor(1) as pool:
            for path in GROWING:
                longest_ms: list[float] = []
                for _ in range(READS):
                    reading, answers_ms = (
                        pool.submit(httpx.get, self.server.url + path, timeout=WAIT_S),
                        [0.0],
                    )
                    while not reading.done():
                        began = time.perf_counter()
                        self.control.request("GET", "/healthz")
                        answers_ms.append((time.perf_counter() - began) * 1e3)
                    reading.result().raise_for_status()
                    longest_ms.append(max(answers_ms))
                self.stalls_ms[path] = median(longest_ms)

    def figures(self) -> dict[str, Any]:
        """Return medians, and percentiles of the cold starts."""
        return {
            "functions": self.size,
            "cold_p50_ms": percentile(self.cold_ms, 0.5), "cold_p99_ms": percentile(self.cold_ms, 0.99),
            "warm_p50_ms": median(self.warm_ms), "starts_per_s": median(self.starts_per_s),
            "deploy_cpu_ms": median(self.deploy_cpu_ms), "gateway_mb": self.gateway_mb,
            "idle_cpu_share": self.idle_share, "stalls_ms": self.stalls_ms,
        }  # fmt: skip


def _at_zero(status: dict[str, Any]) -> bool:
    return bool(status["standby"]) and not any(status["workers"].values())


@contextmanager
def fleets(sizes: Sequence[int]) -> Iterator[list[Fleet]]:
    """A gateway of each size, all of its functions deployed and at zero."""
    with contextlib.ExitStack() as stack:
        found: list[Fleet] = []
        for size in sizes:
            found.append(Fleet(size, *stack.enter_context(gateway(ENVIRONMENT))))
            print(f"{size} functions …", file=sys.stderr, flush=True)
            found[-1].deploy(found[-1].names)
            found[-1].wait_at_zero()
        yield found


def measure(entered: Sequence[Fleet], rounds: int) -> None:
    """Measure the deploys, the calls and the bursts, and then the idle gateways."""
    for turn, fleet in itertools.product(range(DEPLOY_ROUNDS), entered):
        fleet.deploy_again(turn)
    for turn in range(rounds):
        for fleet in entered:
            fleet.control.close()
        for number, fleet in itertools.product(range(CALLS), entered):
            fleet.call(fleet.some(turn)[number % fleet.size])
        time.sleep(QUIET_S)
        for fleet in entered:
            fleet.call_warm(fleet.some(turn)[-1])
    for _, fleet in itertools.product(range(BURSTS), entered):
        fleet.burst()
    time.sleep(SETTLE_S)
    for fleet in entered:
        fleet.read_growing()
    before_s = [fleet.server.cpu_s() for fleet in entered]
    time.sleep(IDLE_S)
    for fleet, used_s in zip(entered, before_s, strict=True):
        fleet.idle_share = (fleet.server.cpu_s() - used_s) / IDLE_S
        fleet.gateway_mb = psutil.Process(fleet.server.pid).memory_info().rss / 1e6


def enter(report: Report, few: dict[str, Any], many: dict[str, Any]) -> None:
    """Enter the ratios of many functions to few, and the figures of many."""
    for name, most in RATIOS.items():
        report.add(f"{name}_ratio", many[name] / few[name], "x", f"<= {most}")
    report.add("starts_per_s", many["starts_per_s"], "/s", ">= 200")
    added_kb = (many["gateway_mb"] - few["gateway_mb"]) * 1e3 / max(1, many["functions"] - few["functions"])
    report.add("gateway_kb_per_function", added_kb, "KB", "<= 150")
    report.add("idle_cpu_share", many["idle_cpu_share"], "of a core", "<= 0.002")
    report.add("stall_ms", max(many["stalls_ms"].values()), "ms", "<= 20")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--functions", type=int, nargs="+", default=[10, 100, 1000])
    options.add_argument("--rounds", type=int, default=20)
    arguments = options.parse_args()
    report = Report("bench-fleet")
    with fleets(sorted(arguments.functions)) as entered:
        measure(entered, arguments.rounds)
        rows = [fleet.figures() for fleet in entered]
    for row in rows:
        report.row(**row)
    enter(report, rows[0], rows[-1])
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

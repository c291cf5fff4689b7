"""The cost of a function among few and among many: starts, calls, deploys, the gateway's memory, and answers about all functions.

    python infra/bench/fleet.py [--functions 20 400] [--rounds 20]

Each size has a gateway of its own, with functions that do nothing. The sizes take turns in every round, so that other
work on the machine affects all of them. Ratios compare the largest size with the smallest. The gateways have the settings that users
have, but for the time to zero, and for `rest_mb`: it has room for 1.5 times the memory of all zygotes, or evictions would decide the
percentiles. Each turn calls functions in a random order, whose seed is printed. A start that the gateway has made ahead of the call is no
cold start, and counts apart.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from control import WAIT_S, Control, gateway
from load import Request, burst
from percentiles import median, percentile
from report import Report, parser
from rounds import rotated
from servers import Server

HANDLER = "def handler(event):\n    return event\n"
CALLS = 10
"""Cold starts, and deploys, of each fleet in a round."""
WARM_CALLS = 50
BURSTS, BURST, DEPLOY_ROUNDS = 20, 20, 3
"""The number of bursts, the functions of one burst, and the rounds of deploys."""
SETTINGS: dict[str, Any] = {"scale.idle_timeout_s": 0.3}
# The memory of a function at rest, the memory of the bases, and the ratio of `rest_mb` to the sum.
REST_MB, BASES_MB, REST_ROOM = 7.4, 150, 1.5
SEED = 49
RATIOS = {"cold_p50": 1.2, "cold_p99": 2, "warm_p50": 1.1, "deploy_cpu": 1.2}
LOOKS = re.compile(r"^pilotflame_reconciler_looks_total (\S+)$", re.MULTILINE)
# Idle gateways are measured for this time, because the accounts are written once a minute.
IDLE_S = 60.0
# Wait for the last measurement of all processes' memory, which follows the last start
# (runtime/node/measuring/node_memory.py).
SETTLE_S = 60.0
# Wait after the cold starts, while standbys are forked and workers end.
QUIET_S = 1.0
# The answers that grow with the number of functions, and how often each is read.
GROWING = ("/metrics", "/v1/functions", "/v1/console", "/openapi.json")
READS = 9


@dataclass
class Fleet:
    """A gateway with functions that have the same code, and what was measured of it.

    A gateway closes connections that are idle for long, so each turn begins with `control.close()`. The next request then opens a new connection.
    """

    size: int
    server: Server
    control: Control
    order: random.Random
    cold_ms: list[float] = field(default_factory=list)
    ahead: int = 0
    """Calls for which the gateway had started a worker ahead."""
    looks: list[float] = field(default_factory=list)
    list_s: list[float] = field(default_factory=list)
    warm_ms: list[float] = field(default_factory=list)
    deploy_cpu_ms: list[float] = field(default_factory=list)
    starts_per_s: list[float] = field(default_factory=list)
    gateway_mb: float = 0.0
    idle_share: float = 0.0
    stalls_ms: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = [f"f{number}" for number in range(self.size)]

    def some(self, count: int = CALLS) -> list[str]:
        """Return random functions, to call or to deploy next."""
        return self.order.sample(self.names, count)

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

    def deploy_again(self) -> None:
        """Deploy some functions again, and append the CPU time of all processes for each of them."""
        before_s, names = self.server.cpu_s(), self.some()
        self.deploy(names)
        for name in names:
            # Not `wait_at_zero`: listing the largest fleet takes more CPU time than a deploy.
            self.control.wait_for(name, workers=0, standby=True)
        self.deploy_cpu_ms.append((self.server.cpu_s() - before_s) * 1e3 / len(names))

    def call(self, name: str) -> None:
        """Call a function at zero."""
        self.control.wait_for(name, workers=0, standby=True)
        reply = self.control.invoke(name, {})
        if reply.cold:
            self.cold_ms.append(reply.ms)
        else:
            self.ahead += 1

    def count_looks(self, name: str) -> None:
        """Note how often the reconciler looks at a revision between a call of a function at zero and its answer."""
        self.control.wait_for(name, workers=0, standby=True)
        before = self._looks()
        if self.control.invoke(name, {}).cold:
            self.looks.append(self._looks() - before)

    def _looks(self) -> float:
        text = httpx.get(self.server.url + "/metrics", timeout=WAIT_S).text
        found = LOOKS.search(text)
        if found is None:
            raise RuntimeError("/metrics has no pilotflame_reconciler_looks_total")
        return float(found[1])

    def list_all(self) -> None:
        """Note how long `pilotflame list` takes."""
        began = time.perf_counter()
        command = [str(Path(sys.executable).with_name("pilotflame")), "list", "--url", self.server.url]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=WAIT_S)
        self.list_s.append(time.perf_counter() - began)

    def call_warm(self, name: str) -> None:
        self.control.invoke(name, {})
        self.warm_ms += [self.control.invoke(name, {}).ms for _ in range(WARM_CALLS)]

    def burst(self) -> None:
        """Call BURST functions that are at zero, all at one instant."""
        self.control.close()
        names = self.some(BURST)
        for name in names:
            self.control.wait_for(name, workers=0, standby=True)
        tally = burst([Request(f"{self.server.url}/invoke/{name}", body=b"{}") for name in names])
        self.starts_per_s.append(len(names) / tally.wall_s)

    def read_growing(self) -> None:
        """Note the longest wait of other requests while the gateway makes each answer of GROWING: the median of READS tries."""
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
            "functions": self.size, "cold_calls": len(self.cold_ms), "ahead": self.ahead,
            "cold_p50": percentile(self.cold_ms, 0.5), "cold_p99": percentile(self.cold_ms, 0.99),
            "warm_p50": median(self.warm_ms), "burst_rate": median(self.starts_per_s),
            "deploy_cpu": median(self.deploy_cpu_ms), "gateway_mb": self.gateway_mb,
            "looks": median(self.looks), "list_s": median(self.list_s),
            "idle_cpu_share": self.idle_share, "stalls_ms": self.stalls_ms,
        }  # fmt: skip


def _at_zero(status: dict[str, Any]) -> bool:
    return bool(status["standby"]) and not any(status["workers"].values())


@contextmanager
def fleets(sizes: Sequence[int]) -> Iterator[list[Fleet]]:
    """Run a gateway of each size. All of its functions are deployed and at zero."""
    with contextlib.ExitStack() as stack:
        found: list[Fleet] = []
        for size in sizes:
            variables = {"PILOTFLAME_REST_MB": str(round((size * REST_MB + BASES_MB) * REST_ROOM))}
            found.append(Fleet(size, *stack.enter_context(gateway(variables)), random.Random(SEED)))
            print(f"{size} functions …", file=sys.stderr, flush=True)
            found[-1].deploy(found[-1].names)
            found[-1].wait_at_zero()
        yield found


def measure(entered: Sequence[Fleet], rounds: int) -> None:
    """Measure the deploys, the calls and the bursts, and then the idle gateways."""
    for _, fleet in itertools.product(range(DEPLOY_ROUNDS), entered):
        fleet.deploy_again()
    for _ in range(rounds):
        call(entered)
    for turn in range(BURSTS):
        for fleet in rotated(entered, turn):
            fleet.burst()
    for fleet in entered:
        fleet.control.close()
        for name in fleet.some():
            fleet.count_looks(name)
        for _ in range(READS):
            fleet.list_all()
    rest(entered)


def call(entered: Sequence[Fleet]) -> None:
    """Call some functions of each fleet at zero, in turn, and one of them when it is warm."""
    for fleet in entered:
        fleet.control.close()
    chosen = [(fleet, fleet.some()) for fleet in entered]
    for number, (fleet, names) in itertools.product(range(CALLS), chosen):
        fleet.call(names[number])
    time.sleep(QUIET_S)
    for fleet, names in chosen:
        fleet.call_warm(names[-1])


def rest(entered: Sequence[Fleet]) -> None:
    """Measure answers about all functions, and what a gateway at rest uses."""
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
        report.add(f"{name}_few", few[name], "ms")
        report.add(f"{name}_many", many[name], "ms")
    report.add("burst_rate_ratio", many["burst_rate"] / few["burst_rate"], "x", ">= 0.9")
    report.add("burst_rate_many", many["burst_rate"], "/s")
    report.add("looks_per_start", many["looks"], "", "<= 3")
    report.add("list_s", many["list_s"], "s", "<= 0.3")
    report.add("ahead", many["ahead"], "calls")
    added_kb = (many["gateway_mb"] - few["gateway_mb"]) * 1e3 / max(1, many["functions"] - few["functions"])
    report.add("gateway_kb_per_function", added_kb, "KB", "<= 150")
    report.add("idle_cpu_share", many["idle_cpu_share"], "of a core", "<= 0.002")
    report.add("stall_ms", max(many["stalls_ms"].values()), "ms", "<= 20")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--functions", type=int, nargs="+", default=[20, 400])
    options.add_argument("--rounds", type=int, default=20)
    arguments = options.parse_args()
    report = Report("bench-fleet")
    report.note(
        f"seed {SEED}; rest_mb is {REST_ROOM} times {REST_MB} MiB for each function and {BASES_MB} MiB"
    )
    with fleets(sorted(arguments.functions)) as entered:
        measure(entered, arguments.rounds)
        rows = [fleet.figures() for fleet in entered]
    for row in rows:
        report.row(**row)
    enter(report, rows[0], rows[-1])
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""`make bench-warm`, two tenants: one sends 50 times the other's load; what the small one's callers notice of it.

One worker with the sleep curve; two API keys; Poisson arrivals of both, in generators of their own. The small one alone,
beside the big one at 50 times its rate, and beside one that sends half as much again as the worker can do: in rounds, and
the percentile is of all rounds' answers, since a few hundred have no p99 worth the name.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from http1 import Request
from load import Tally, load_apart
from report import Report
from warm_peers import Choice, Contender, start

SMALL_RATE = 10.0
BIG_RATE = 500.0
FOR_S = 20.0
ROUNDS = 3
HANDLER = "sleep"


def key(contender: Contender, name: str) -> str:
    """A new API key, made as an operator makes it."""
    command = [sys.executable, "-m", "pilotflame.runtime.cli", "keys", "create", name]
    command += ["--state-dir", contender.server.state, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=30)
    return str(json.loads(done.stdout)["key"])


def as_tenant(request: Request, of: str) -> Request:
    return replace(request, headers={**request.headers, "Authorization": f"Bearer {of}"})


def measure(report: Report, capacity: float, for_s: float = FOR_S) -> None:
    """Enters small_tenant_p99_ratio and what it is made of."""
    with start(Choice("pilotflame"), HANDLER) as contender:
        contender.warm_up()
        small, big = (as_tenant(contender.request, key(contender, name)) for name in ("small", "big"))
        rates = {"alone": 0.0, "beside_50_times": BIG_RATE, "beside_1_5x": 1.5 * capacity}
        tallies = {name: Tally() for name in rates}
        for number in range(ROUNDS):
            for name, rate in rates.items():
                add(tallies[name], beside(small, big, rate, for_s / ROUNDS * 2, 1 + number))
    alone_ms = tallies["alone"].p_ms(0.99)
    for name, tally in tallies.items():
        report.add(f"small_tenant_p99_{name}_ms", tally.p_ms(0.99), "ms")
        report.add(f"small_tenant_answered_{name}", tally.right / max(1, tally.answers))
        report.row(part="tenants", case=name, big_rate=rates[name], **tally.summary())
    ratio = tallies["beside_50_times"].p_ms(0.99) / alone_ms
    report.add("small_tenant_p99_ratio", ratio, "x alone", "<= 1.5")
    ratio = tallies["beside_1_5x"].p_ms(0.99) / alone_ms
    report.add("small_tenant_p99_ratio_1_5x", ratio, "x alone")


def add(whole: Tally, part: Tally) -> None:
    whole.latencies_ns += part.latencies_ns
    for status, count in part.statuses.items():
        whole.statuses[status] = whole.statuses.get(status, 0) + count


def beside(small: Request, big: Request, big_rate: float, for_s: float, seed: int) -> Tally:
    """Return the small tenant's tally while the big tenant sends at `big_rate`, from a second before until the end."""
    with ThreadPoolExecutor(1) as threads:
        other = (
            threads.submit(load_apart, big, rate=big_rate, duration_s=for_s + 1, seed=2) if big_rate else None
        )
        tally = load_apart(small, rate=SMALL_RATE, duration_s=for_s, warmup_s=1.0, seed=seed)
        if other is not None:
            other.result()
    return tally

"""Two tenants of one worker: one sends 50 times the load of the other.

Measures what the callers of the small tenant notice.

Part of `make bench-warm`. Turns of the small tenant alone alternate with turns beside the large tenant.
Percentiles are of all rounds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from load import Request, Tally, load_apart
from report import Report
from servers import Server

SMALL_RATE, LARGE_RATE = 10.0, 500.0
ROUNDS = 3


def measure(report: Report, server: Server, request: Request, for_s: float) -> None:
    """Enter small_tenant_p99_ratio, the latency beside the large tenant relative to the latency alone."""
    small, large = (as_tenant(request, key(server, name)) for name in ("small", "large"))
    load_apart(small, callers=8, duration_s=0.7)
    alone, beside = Tally(), Tally()
    for number in range(ROUNDS):
        for whole, rate in ((alone, 0.0), (beside, LARGE_RATE)):
            part = small_tally(small, large, rate, for_s, 1 + number)
            if not part.clean:
                report.fail(f"the small tenant was refused or answered wrongly: {part.summary()}")
            whole.latencies_ns += part.latencies_ns
    report.row(part="tenants", alone_ms=alone.p_ms(0.99), beside_ms=beside.p_ms(0.99))
    report.add("small_tenant_p99_ratio", beside.p_ms(0.99) / alone.p_ms(0.99), "x alone", "<= 1.5")


def key(server: Server, name: str) -> str:
    """Make an API key with the command line."""
    command = [sys.executable, "-m", "pilotflame.runtime.cli", "keys", "create", name]
    command += ["--state-dir", server.state, "--json"]
    done = subprocess.run(command, check=True, capture_output=True, timeout=30)
    return str(json.loads(done.stdout)["key"])


def as_tenant(request: Request, of: str) -> Request:
    return replace(request, headers={**request.headers, "Authorization": f"Bearer {of}"})


def small_tally(small: Request, large: Request, large_rate: float, for_s: float, seed: int) -> Tally:
    """Return the tally of the small tenant. The large tenant begins a second earlier, and sends until the
    end.
    """
    with ThreadPoolExecutor(1) as threads:
        if large_rate:
            threads.submit(load_apart, large, rate=large_rate, duration_s=for_s + 1, seed=2)
        return load_apart(small, rate=SMALL_RATE, duration_s=for_s, warmup_s=1.0, seed=seed)

"""`make bench-warm`, the cost of the path: requests per second of processor time on `hello`, beside a bare echo."""

from __future__ import annotations

import hello
from report import Report


def measure(report: Report, rounds: int) -> None:
    """Enters echo_cpu_share: 32 callers, interleaved rounds, every process of each counted."""
    plan = hello.Plan(rounds=rounds, single_s=0.5)
    with hello.contestants(ours=True, litserve=None) as entered:
        hello.run_rounds(entered, report, plan)
    for contestant in entered.values():
        hello.enter_each(report, contestant, plan.callers)
    hello.enter_cpu_share(report, entered, ">= 0.55")

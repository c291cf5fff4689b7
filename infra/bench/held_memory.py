"""What `list` and `usage` say of the memory, beside the PSS of the process tree, sampled each second for a minute.

The model is all-MiniLM-L6-v2: two cold starts, an idle worker after each, and zero workers for the rest.

    python infra/bench/held_memory.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import sys
import time

import cold
import psutil
from control import Control
from memory import held_by_tree, total_pss_mb
from report import Report

IDLE_S = 10.0
# Shares of the time after which a call comes.
CALLS_AT = (0.1, 0.6)
# After a process has come or gone, the next figures are there.
SETTLED_S = 4.0
MB, GB = 1e6, 1e9


def listed(report: Report, control: Control, pid: int, when: str) -> None:
    found = control.request("GET", "/v1/functions?memory=1")
    tree_mb, sums = total_pss_mb(held_by_tree(pid)), found["memory"]
    list_mb = sums["total_bytes"] / MB
    report.add(f"list_{when}_mb", list_mb, "MB")
    report.add(f"tree_{when}_mb", tree_mb, "MB")
    report.add(f"list_{when}_error", abs(list_mb / tree_mb - 1), "", "<= 0.1")
    parts = {f"{part}_mb": sums[f"{part}_bytes"] / MB for part in ("functions", "bases", "gateway")}
    report.row(when=when, **parts)


def used(report: Report, control: Control, pid: int, seconds: int) -> None:
    """Sample the tree in the middle of each second, and compare the sum with what the usage has grown by."""
    calls_at = [round(share * seconds) for share in CALLS_AT]
    before, started_s, sampled_mb_s = memory_gb_s(control), time.monotonic(), 0.0
    for number in range(seconds):
        if number in calls_at:
            control.invoke(cold.NAME, cold.EVENT)
        time.sleep(max(0.0, started_s + number + 0.5 - time.monotonic()))
        sampled_mb_s += total_pss_mb(held_by_tree(pid))
        if number == calls_at[0] + SETTLED_S:
            listed(report, control, pid, "with_worker")
    time.sleep(max(0.0, started_s + seconds - time.monotonic()))
    usage_gb_s, sampled_gb_s = memory_gb_s(control) - before, sampled_mb_s * MB / GB
    report.add("usage_gb_s", usage_gb_s, "GB s")
    report.add("sampled_gb_s", sampled_gb_s, "GB s")
    report.add("usage_error", abs(usage_gb_s / sampled_gb_s - 1), "", "<= 0.1")


def memory_gb_s(control: Control) -> float:
    return float(control.request("GET", "/v1/usage")["total"]["memory_gb_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=60)
    arguments = parser.parse_args()
    report = Report("held-memory", packages=("torch", "transformers"))
    with cold.deployed(**{"scale.idle_timeout_s": IDLE_S}) as control:
        (gateway,) = psutil.Process().children()
        pid = gateway.pid
        # The check of a deploy ends before its worker is measured. So the first call also prices the seconds of that one.
        control.invoke(cold.NAME, cold.EVENT)
        control.wait_for(cold.NAME, workers=0, standby=True)
        time.sleep(SETTLED_S)
        listed(report, control, pid, "at_rest")
        used(report, control, pid, arguments.seconds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

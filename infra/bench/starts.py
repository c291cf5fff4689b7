"""Many workers of one small function, started at once from zero: the time until all are ready, and their memory.

    python infra/bench/starts.py [--workers 500] [--rounds 3]

Then one request for each worker arrives at one instant. Each request sleeps for a second in its worker.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from control import Control
from http1 import Request
from memory import held_by_tree, total_pss_mb
from opened import OpenLoop
from report import Report
from servers import Server, start_pilotflame

NAME = "starts"
WAIT_S = 300
SLEEP_S = 1.0
HANDLER = f"import time\ndef handler(event):\n    time.sleep({SLEEP_S})\n    return event"


def play(report: Report, folder: Path, server: Server, control: Control, workers: int) -> tuple[float, float]:
    """One round. Return the seconds until all workers are ready, and the memory in KB that each adds."""
    control.deploy(str(_function(folder)), **settings(workers))
    control.invoke(NAME, {})
    control.wait_for(NAME, workers=0)
    before_mb = total_pss_mb(held_by_tree(server.pid))
    started_s = time.perf_counter()
    control.request("POST", f"/v2/{NAME}/warmup?workers={workers}&wait_s={WAIT_S}")
    ready_s = time.perf_counter() - started_s
    answered_s = answer(control, workers)
    added_kb = (total_pss_mb(held_by_tree(server.pid)) - before_mb) * 1e3 / workers
    report.row(workers=workers, ready_s=ready_s, answered_s=answered_s, added_kb=added_kb)
    return ready_s, added_kb


def settings(workers: int) -> dict[str, object]:
    """Return the deploy's settings: workers that run one call at a time."""
    return {
        "name": NAME, "threads": 1, "concurrency": 1, "max_queue": 10_000,
        "scale.max": workers, "scale.idle_timeout_s": 0.5,
    }  # fmt: skip


def answer(control: Control, calls: int) -> float:
    """Send all calls at one instant. Return the seconds in which all are answered."""
    request = Request(
        f"{control.url}/invoke/{NAME}", body=b"{}", headers={"Content-Type": "application/json"}
    )
    started_s = time.perf_counter()
    tally = asyncio.run(OpenLoop(request, calls).run([0] * calls, calls, 120.0))
    if not tally.clean or tally.right != calls:
        raise RuntimeError(f"{tally.right} of {calls} answered; {tally.statuses} {tally.errors}")
    return time.perf_counter() - started_s


def _function(folder: Path) -> Path:
    (folder / "handler.py").write_text(HANDLER)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    report = Report("bench-starts")
    found = list[tuple[float, float]]()
    for _ in range(arguments.rounds):
        with start_pilotflame() as server, tempfile.TemporaryDirectory() as folder:
            control = Control(server.url)
            try:
                found.append(play(report, Path(folder), server, control, arguments.workers))
            finally:
                control.close()
    ready_s, added_kb = (median(values) for values in zip(*found, strict=True))
    report.add("workers", arguments.workers)
    report.add("ready_s", ready_s, "s")
    report.add("worker_adds_kb", added_kb, "KB")
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

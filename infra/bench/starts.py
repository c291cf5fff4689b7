"""Many workers of one small function, started at once from zero: the time until all are ready, and their memory.

    python infra/bench/starts.py [--workers 500] [--rounds 3]

Then one request for each worker arrives at one instant, so that each worker runs the handler before memory is measured.
"""

from __future__ import annotations

import sys
import time
from statistics import median

from control import Control, gateway
from load import Request, burst
from report import Report, parser
from servers import Server

NAME = "starts"
WAIT_S = 300
SLEEP_S = 1.0
HANDLER = f"import time\ndef handler(event):\n    time.sleep({SLEEP_S})\n    return event"


SETTINGS = {"threads": 1, "concurrency": 1, "max_queue": 10_000, "scale.idle_timeout_s": 0.5}


def measure_round(report: Report, server: Server, control: Control, workers: int) -> tuple[float, float]:
    """Run one round. Return the seconds until all workers are ready, and the memory in KB that each adds."""
    control.deploy_code(NAME, HANDLER, **SETTINGS, **{"scale.max": workers})
    control.invoke(NAME, {})
    control.wait_for(NAME, workers=0)
    before_mb = server.pss_mb()
    started_s = time.perf_counter()
    control.request("POST", f"/v2/{NAME}/warmup?workers={workers}&wait_s={WAIT_S}")
    ready_s = time.perf_counter() - started_s
    burst([Request(f"{control.url}/invoke/{NAME}", body=b"{}")] * workers)
    added_kb = (server.pss_mb() - before_mb) * 1e3 / workers
    report.row(workers=workers, ready_s=ready_s, added_kb=added_kb)
    return ready_s, added_kb


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=500)
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    report = Report("bench-starts")
    found = list[tuple[float, float]]()
    for _ in range(arguments.rounds):
        with gateway() as (server, control):
            found.append(measure_round(report, server, control, arguments.workers))
    ready_s, added_kb = (median(values) for values in zip(*found, strict=True))
    report.note(f"{arguments.workers} workers")
    report.add("ready_s", ready_s, "s")
    report.add("worker_adds_kb", added_kb, "KB")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

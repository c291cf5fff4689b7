"""Memory: the amount that the fourth worker of one function adds."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from cold import EVENT, NAME, deployed
from control import Control
from report import Report

WORKERS = 4
CALLS_EACH = 4
ROUNDS = 10


def measure(report: Report) -> None:
    """Enters fourth_worker_uss_mb: unique memory of the worker started last, after all have served."""
    with deployed(**{"scale.idle_timeout_s": 30.0, "scale.max": WORKERS}) as control:
        control.request("POST", f"/v2/{NAME}/warmup?workers={WORKERS}")
        control.wait_for(NAME, workers=WORKERS)
        serve_all(control)
        processes = control.status(NAME, memory=True)["processes"]
    workers = [process for process in processes if process["role"] == "worker"]
    last = max(workers, key=lambda process: int(process["name"].rpartition("-")[2]))
    for process in processes:
        report.row(**process)
    report.add("fourth_worker_uss_mb", last["uss_mb"], "MB", "< 60")
    report.add("workers_total_pss_mb", sum(process["pss_mb"] for process in workers), "MB")


def serve_all(control: Control) -> None:
    """Calls at once, until each worker has run the model: idle memory would flatter."""
    served: set[str] = set()

    def call(_: int) -> None:
        own = Control(control.url)
        try:
            served.update(own.invoke(NAME, EVENT).worker for _number in range(CALLS_EACH))
        finally:
            own.close()

    for _round in range(ROUNDS):
        with ThreadPoolExecutor(2 * WORKERS) as pool:
            list(pool.map(call, range(2 * WORKERS)))
        if len(served) >= WORKERS:
            return
    raise RuntimeError(f"only {sorted(served)} of {WORKERS} workers were given work")


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    report = Report("fourth", packages=("torch", "transformers"))
    measure(report)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

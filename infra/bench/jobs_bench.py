"""`make bench-jobs`: durable submits beside the fsync floor, status with a million jobs, the store's size.

python infra/bench/jobs_bench.py [--quick]
"""

from __future__ import annotations

import argparse
import sys

import jobs_http
import jobs_store
import uvloop
from report import Report


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure jobs.")
    parser.add_argument("--quick", action="store_true", help="smaller amounts: does it work at all")
    arguments = parser.parse_args()
    report = Report("bench-jobs")
    if arguments.quick:
        report.note("a quick run: not the figures")
    with report.part("store"):
        uvloop.run(jobs_store.measure(report, jobs_store.QUICK if arguments.quick else jobs_store.FULL))
    with report.part("http"):
        jobs_http.measure(report, quick=arguments.quick)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

"""`make bench`: cold start, the warm path and memory, each beside its floor or its rival in the same run."""

from __future__ import annotations

import argparse
import sys

import cold
import fourth
import hello
from report import Report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25, help="cold starts (at least 20)")
    parser.add_argument("--hello-rounds", type=int, default=7)
    arguments = parser.parse_args()
    report = Report("bench", packages=("torch", "transformers", "litserve"))
    with report.part("cold"):
        cold.measure(report, arguments.rounds)
    with report.part("fourth"):
        fourth.measure(report)
    with report.part("hello"):
        hello.measure(report, hello.Plan(rounds=arguments.hello_rounds))
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

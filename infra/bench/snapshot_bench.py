"""`make bench-snapshot`: the snapshot engine beside raw sockets, client libraries and loaders, in the same run.

python infra/bench/snapshot_bench.py [--quick] [--rounds N] [--only GROUP ...]
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable

import arrivals
import beside
import checkpoint
import delta
import disk
import first_request
import local
import memory_folder
import neighbours
import peak
import resident
import straggler
import transfers
import tuning
from lane import LaneError
from nginx import start_nginx
from report import Report

PACKAGES = (
    "torch",
    "boto3",
    "obstore",
    "tensorizer",
    "runai-model-streamer",
    "awscrt",
    "xxhash",
    "h11",
    "safetensors",
)
QUICK_ROUNDS, ROUNDS = 2, 5


def groups(report: Report, where: transfers.Field, quick: bool) -> dict[str, Callable[[], None]]:
    """The groups of measurements, in order. Each enters its figures."""
    giant = checkpoint.FULL if quick else checkpoint.GIANT
    server, data, rounds = where.server, where.data, where.rounds
    return {
        "ceiling": lambda: transfers.ceiling(report, where),
        "clients": lambda: transfers.libraries(report, where),
        "loaders": lambda: transfers.whole(report, where),
        "verify": lambda: transfers.verify(report, where),
        "tls": lambda: transfers.tls(report, where),
        "local": lambda: local.measure(report, data, rounds),
        "disk": lambda: disk.measure(report, 2 * rounds),
        "first": lambda: _first(report, where),
        "resident": lambda: _resident(report, where, quick),
        "overlap": lambda: arrivals.overlap(report, server, rounds),
        "delta": lambda: delta.measure(report, data, rounds),
        "beside": lambda: beside.measure(report, data, min(rounds, 3)),
        "peers": lambda: neighbours.measure(report, data, rounds),
        "tuning": lambda: tuning.measure(report, quick),
        "straggler": lambda: straggler.measure(report, rounds, quick),
        "peak": lambda: peak.measure(report, giant),
    }


def _resident(report: Report, where: transfers.Field, quick: bool) -> None:
    resident.measure(report, checkpoint.checkpoint(checkpoint.FULL), "1gb", where.rounds)
    if not quick:
        giant = checkpoint.snapshot(checkpoint.GIANT, checkpoint.DATA / checkpoint.BUCKET)
        resident.measure(report, giant, "6gb", where.rounds)


def _first(report: Report, where: transfers.Field) -> None:
    first_request.measure(report, where.rounds)
    arrivals.first_tensor(report, where.server, where.data, where.rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the snapshot engine.")
    parser.add_argument("--quick", action="store_true", help="100 MB and 2 rounds: does it work at all")
    parser.add_argument("--rounds", type=int, help=f"at least {ROUNDS} for figures that count")
    parser.add_argument("--only", nargs="+", metavar="GROUP", help="these groups alone")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and lanes are ended
    report = Report("bench-snapshot", packages=PACKAGES)
    if arguments.quick or arguments.only:
        report.note("a part of the run, or a quick one: not the figures")
    data = checkpoint.checkpoint(checkpoint.QUICK if arguments.quick else checkpoint.FULL)
    with memory_folder.mounted(), start_nginx(checkpoint.DATA) as server:
        report.note(memory_folder.told())
        rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
        found = groups(report, transfers.field(server, data, rounds), arguments.quick)
        if unknown := set(arguments.only or ()) - found.keys():
            parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(found)}")
        failed: list[str] = []
        for name in arguments.only or found:
            print(f"== {name}", flush=True)
            started_s = time.monotonic()
            try:
                found[name]()
            except (LaneError, RuntimeError, OSError) as error:
                failed.append(name)
                report.fail(f"{name} failed: {str(error)[-600:]}")
                print(f"   {name} failed: {error}", file=sys.stderr, flush=True)
            print(f"   {name} took {time.monotonic() - started_s:.0f} s", flush=True)
    report.add("groups_failed", len(failed), "", "== 0")
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

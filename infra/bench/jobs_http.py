"""Jobs over HTTP: durable submits a second through the gateway, and what a stored job costs from submit to result.

python infra/bench/jobs_http.py [--quick]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from control import Control
from load import Request, Tally, load_apart
from percentiles import median
from report import Report
from servers import Server, start_pilotflame

CALLERS = 64
SECONDS, QUICK_SECONDS = 4.0, 1.0
ROUNDS, QUICK_ROUNDS = 5, 2
INPUT = b'{"input": {"prompt": "' + b"x" * 200 + b'"}}'
# Takes one job and keeps it, so that the benchmark measures submission and not execution.
_KEEPS = "import time\n\ndef handler(event):\n    time.sleep(600)\n"
# The benchmark submits more jobs than the limits of a queue usually allow.
_SETTINGS = {"scale.max": "1", "max_jobs": "10000000", "max_jobs_bytes": str(64 << 30)}
_ECHO = "def handler(event):\n    return event\n"


def measure(report: Report, *, quick: bool) -> None:
    """Enters submits_per_s and, beside it, the rate of jobs that are run."""
    seconds, rounds = (QUICK_SECONDS, QUICK_ROUNDS) if quick else (SECONDS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-") as folder, start_pilotflame() as server:
        for name, handler in (("keeps", _KEEPS), ("echo", _ECHO)):
            Path(folder, name).mkdir()
            Path(folder, name, "handler.py").write_text(handler)
            control = Control(server.url)
            control.deploy(str(Path(folder, name)), name=name, **_SETTINGS)
            control.close()
        submits, waits = [], []
        for _ in range(rounds):
            submits.append(_load(report, server, "/v2/keeps/run", seconds))
            waits.append(_load(report, server, "/v2/echo/runsync", seconds))
        report.row(group="submits", runs=[tally.summary() for tally in submits])
        report.row(group="run and wait", runs=[tally.summary() for tally in waits])
    report.add("submits_per_s", median([tally.per_second for tally in submits]), "/s", ">= 2000")
    report.add("submit_p50_ms", median([tally.p_ms(0.5) for tally in submits]), "ms")
    report.add("submit_p99_ms", median([tally.p_ms(0.99) for tally in submits]), "ms")
    report.add("runsync_per_s", median([tally.per_second for tally in waits]), "/s", ">= 2000")
    report.add("runsync_p50_ms", median([tally.p_ms(0.5) for tally in waits]), "ms")
    share = max(tally.generator_share for tally in submits)
    report.note(
        f"submits_per_s: {CALLERS} callers over HTTP, 200 bytes of input, answered once the job is on the disk; the"
        f" generator used up to {share:.0%} of a core"
    )


def _load(report: Report, server: Server, path: str, seconds: float) -> Tally:
    request = Request(server.url + path, body=INPUT, headers={"Content-Type": "application/json"})
    tally = load_apart(request, callers=CALLERS, duration_s=seconds)
    if not tally.clean:
        report.fail(f"{path} was refused or answered wrongly: {tally.summary()}")
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description="Jobs over HTTP.")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    report = Report("bench-jobs-http")
    measure(report, quick=arguments.quick)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

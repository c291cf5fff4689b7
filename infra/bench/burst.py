"""A burst of 200 requests on a function at zero: how long callers wait, and how many workers start.

    python infra/bench/burst.py [--rounds 7] [--calls 200]

Each round has for each function, in turn: one request on the function at zero (the cold start alone), a burst on one
warm worker (the work), and a burst on the function at zero. A burst comes at one instant on connections that are open.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from control import Control
from http1 import Request
from opened import OpenLoop
from report import Report
from servers import start_pilotflame
from tally import Tally

# As runtime/scaling/seen.py.
TARGET_S = 0.1
WORKERS = 4
SPIN = """
import time
def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
"""
HANDLERS = {
    "hello": "def handler(event):\n    return event",
    "plain": SPIN + "def handler(event):\n    spin(0.002)\n    return event",
    "waiting": "import time\ndef handler(event):\n    time.sleep(0.02)\n    return event",
    "batched": SPIN
    + "import pilotflame\n@pilotflame.batch(max_size=32)\ndef handler(events):\n    spin(0.004 + 0.0005 * len(events))\n    return events",
}


@dataclass
class Burst:
    """One function's figures, a value for each round."""

    name: str
    cold_ms: list[float] = field(default_factory=list)
    work_ms: list[float] = field(default_factory=list)
    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    needed: list[int] = field(default_factory=list)


@contextmanager
def deployed(names: list[str]) -> Iterator[Control]:
    """A gateway with each function twice: one that scales from zero, and one with a single worker that stays."""
    # Otherwise a function that is called after another one gets a worker ahead.
    quiet = {"PILOTFLAME_LEARN_UPSTREAMS": "false"}
    with start_pilotflame(quiet) as server, tempfile.TemporaryDirectory(prefix="pilotflame-burst-") as folder:
        control = Control(server.url)
        try:
            for name in names:
                home = Path(folder) / name
                home.mkdir()
                (home / "handler.py").write_text(HANDLERS[name])
                common = {"threads": 1, "max_queue": 10_000}
                scale = {"scale.max": WORKERS, "scale.idle_timeout_s": 0.5}
                control.deploy(str(home), name=name, **scale, **common)
                control.deploy(str(home), name=f"{name}-one", **{"scale.min": 1, "scale.max": 1}, **common)
            yield control
        finally:
            control.close()


def burst(control: Control, name: str, calls: int) -> Tally:
    """Send all calls at one instant. All must be answered."""
    event = b'{"text": "pilot"}'
    request = Request(
        f"{control.url}/invoke/{name}", body=event, headers={"Content-Type": "application/json"}
    )
    tally = asyncio.run(OpenLoop(request, calls).run([0] * calls, calls, 120.0))
    if not tally.clean or tally.right != calls:
        raise RuntimeError(f"{name}: {tally.right} of {calls} answered; {tally.statuses} {tally.errors}")
    return tally


def play(control: Control, one: Burst, calls: int) -> None:
    """One round."""
    control.wait_for(one.name, workers=0, standby=True)
    reply = control.invoke(one.name, {"text": "pilot"})
    if not reply.cold:
        raise RuntimeError(f"{one.name} was not at zero")
    work = burst(control, f"{one.name}-one", calls)
    before = control.wait_for(one.name, workers=0, standby=True)["activations"]
    tally = burst(control, one.name, calls)
    after = control.status(one.name)["activations"]
    one.cold_ms.append(reply.ms)
    one.work_ms.append(work.p_ms(0.99))
    one.p50_ms.append(tally.p_ms(0.5))
    one.p99_ms.append(tally.p_ms(0.99))
    one.started.append(after - before)
    one.needed.append(needed(reply.ms, work.p_ms(0.99)))


def needed(cold_ms: float, work_ms: float) -> int:
    """How many workers end one worker's work within the time of a start, and at least TARGET_S."""
    return max(1, min(WORKERS, math.ceil(work_ms / max(cold_ms, TARGET_S * 1e3))))


def enter(report: Report, one: Burst) -> None:
    cold_ms, work_ms, p99_ms = median(one.cold_ms), median(one.work_ms), median(one.p99_ms)
    over = [started - enough for started, enough in zip(one.started, one.needed, strict=True)]
    report.row(
        function=one.name, cold_ms=cold_ms, work_ms=work_ms, p50_ms=median(one.p50_ms), p99_ms=p99_ms,
        started=median(one.started), needed=median(one.needed), most_over=max(over),
    )  # fmt: skip
    report.add(f"burst_{one.name}_p99_vs_cold_and_work", p99_ms / (cold_ms + work_ms), "x", "<= 1.5")
    report.add(f"burst_{one.name}_workers_over", median(over), "", "<= 1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=200)
    arguments = parser.parse_args()
    report = Report("bench-burst")
    bursts = [Burst(name) for name in HANDLERS]
    with deployed(list(HANDLERS)) as control:
        for one in bursts:
            # How long a call and a start take is learned here.
            control.wait_for(one.name, workers=0, standby=True)
            burst(control, one.name, arguments.calls)
        for _ in range(arguments.rounds):
            for one in bursts:
                play(control, one, arguments.calls)
    for one in bursts:
        enter(report, one)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

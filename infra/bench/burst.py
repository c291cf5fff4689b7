"""A burst of 200 requests on a function at zero: how long callers wait, and how many workers start.

    python infra/bench/burst.py [--rounds 7] [--calls 200]

Each round has for each function, in turn: one request on the function at zero (the cold start alone), a burst on one
warm worker (the work), and a burst on the function at zero. A burst comes at one instant on connections that are open.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from statistics import median

from control import Control, gateway
from load import Request, burst
from report import Report, parser

# As runtime/node/scaling/seen.py.
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
    + "import pilotflame\n@pilotflame.batch(max_size=32)\ndef handler(events):\n"
    + "    spin(0.004 + 0.0005 * len(events))\n    return events",
}


EVENT = {"text": "pilot"}


@dataclass
class Figures:
    """The figures of one function, a value for each round."""

    name: str
    cold_ms: list[float] = field(default_factory=list)
    work_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    over: list[int] = field(default_factory=list)
    """Workers that started beyond the needed ones."""


def deploy(control: Control) -> None:
    """Deploy each function twice: one that scales from zero, and one with a single worker that stays."""
    common = {"threads": 1, "max_queue": 10_000}
    scale = {"scale.max": WORKERS, "scale.idle_timeout_s": 0.5}
    for name, handler in HANDLERS.items():
        control.deploy_code(name, handler, **scale, **common)
        control.deploy_code(f"{name}-one", handler, **{"scale.min": 1, "scale.max": 1}, **common)


def burst_p99_ms(control: Control, name: str, calls: int) -> float:
    """Send all calls at one instant, and return the 99th percentile of their latencies."""
    request = Request(f"{control.url}/invoke/{name}", body=json.dumps(EVENT).encode())
    return burst([request] * calls).p_ms(0.99)


def measure_round(control: Control, one: Figures, calls: int) -> None:
    """Run one round."""
    control.wait_for(one.name, workers=0, standby=True)
    reply = control.invoke(one.name, EVENT)
    if not reply.cold:
        raise RuntimeError(f"{one.name} was not at zero")
    work_ms = burst_p99_ms(control, f"{one.name}-one", calls)
    before = control.wait_for(one.name, workers=0, standby=True)["activations"]
    one.p99_ms.append(burst_p99_ms(control, one.name, calls))
    started = control.status(one.name)["activations"] - before
    one.cold_ms.append(reply.ms)
    one.work_ms.append(work_ms)
    one.over.append(started - needed(reply.ms, work_ms))


def needed(cold_ms: float, work_ms: float) -> int:
    """Return how many workers end the work of one worker within the time of a start, and at least TARGET_S."""
    return max(1, min(WORKERS, math.ceil(work_ms / max(cold_ms, TARGET_S * 1e3))))


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--calls", type=int, default=200)
    arguments = options.parse_args()
    report = Report("bench-burst")
    functions = [Figures(name) for name in HANDLERS]
    # Otherwise a function that is called after another one gets a worker ahead.
    with gateway({"PILOTFLAME_LEARN_UPSTREAMS": "false"}) as (_, control):
        deploy(control)
        for one in functions:
            # The gateway learns here how long a call and a start take.
            control.wait_for(one.name, workers=0, standby=True)
            burst_p99_ms(control, one.name, arguments.calls)
        for _ in range(arguments.rounds):
            for one in functions:
                measure_round(control, one, arguments.calls)
    for one in functions:
        report.row(**vars(one))
        ratio = median(one.p99_ms) / (median(one.cold_ms) + median(one.work_ms))
        report.add(f"burst_{one.name}_p99_vs_cold_and_work", ratio, "x", "<= 1.5")
        report.add(f"burst_{one.name}_workers_over", median(one.over), "", "<= 1")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""The simulator beside the live system: the same arrivals through both, and by how much their on-time shares differ.

    python infra/bench/replay.py [--for 60] [--shares 0.9 1.2]

Live: the sleep curve (20 + 0.5 b ms) on one worker, an open loop with X-Request-Timeout, arrivals of data/ scaled to a share
of the worker's capacity. Simulated: the same instants, with the curve that the live run left behind when its worker went.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import servers
from control import Control
from http1 import Request
from load import load_apart
from pilotflame.runtime.batching.latency_curve import LatencyCurve, Point
from pilotflame.runtime.batching.simulator import (
    CallOutcome,
    DurationModel,
    SimulatedCall,
    SimulatedFunction,
    Simulator,
)
from pilotflame.runtime.plugins.simulate.command import figures
from report import Report
from warm_open import DEADLINES
from warm_replay import instants_ns, replay

LIMIT = 32
FOLDER = Path(__file__).with_name("functions") / "sleep"
ALONE_S, CAPACITY = 0.0205, LIMIT / 0.036
DEADLINE_S = DEADLINES * ALONE_S
SHARES = (0.9, 1.2)
# Idle time before the worker stops. The gateway writes the worker's curve only then.
IDLE_S = 3.0
WAIT_S = 30.0


@dataclass(frozen=True)
class Learned:
    """The measurements of the live run."""

    points: tuple[Point, ...]
    way_s: float
    """The wait of a lone caller beyond the group's own time: HTTP, and the generator."""
    each_s: float
    """The processor time of one call. The calls of a group are answered one after the other, at this interval."""

    @property
    def noise(self) -> float:
        """The 95th percentile of a normal distribution is 1.645 standard deviations above its middle."""
        ratios = sorted(point.p95_s / point.p50_s - 1 for point in self.points)
        return ratios[len(ratios) // 2] / 1.645


def simulate(instants: Sequence[int], learned: Learned) -> dict[str, Any]:
    """The simulator's figures for these arrivals, and the share that its callers would call on time."""
    timed = DurationModel(tuple((point.size, point.p50_s) for point in learned.points), learned.noise)
    # What the gateway measured includes the way to the worker.
    plant = SimulatedFunction(timed, max_batch=LIMIT, transit_s=0.0)
    calls = (SimulatedCall(instant / 1e9, DEADLINE_S, body=b"%d" % at) for at, instant in enumerate(instants))
    run = Simulator(plant, curve=LatencyCurve(learned.points)).run(calls)
    before: Counter[float] = Counter()  # by the end of a group: how many of its calls are answered so far
    in_time = 0
    for one in run.attempts:
        if one.outcome is CallOutcome.ON_TIME:
            waits_s = learned.way_s + before[one.ended_s] * learned.each_s
            before[one.ended_s] += 1
            in_time += one.latency_s + waits_s <= DEADLINE_S
    return {**figures(run), "on_time_for_callers": in_time / len(run.attempts)}


@contextmanager
def live() -> Iterator[tuple[Request, servers.Server]]:
    """The sleep curve on one worker, warm, and the request."""
    with servers.start_pilotflame() as server, closing(Control(server.url)) as control:
        control.deploy(str(FOLDER), **{"scale.max": 1, "scale.idle_timeout_s": IDLE_S})
        request = Request(
            f"{server.url}/invoke/sleep", body=b'{"value": 7}', headers={"Content-Type": "application/json"}
        )
        for callers in (1, 8, 32, 128):
            load_apart(request, callers=callers, duration_s=0.7)
        yield request, server


def learned_of(request: Request, server: servers.Server, each_s: float) -> Learned:
    """Asked after the load: one caller's time, then the curve once the worker has gone."""
    folder = Path(server.state) / "curves"
    alone = load_apart(request, callers=1, duration_s=1.0)
    deadline_s = time.monotonic() + WAIT_S
    while not (found := list(folder.glob("*.json"))):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no curve was written to {folder} within {WAIT_S:.0f} s")
        time.sleep(0.1)
    (points,) = json.loads(found[0].read_text()).values()
    curve = tuple(Point(**point) for point in points)
    return Learned(curve, max(0.0, alone.p_ms(0.5) / 1e3 - LatencyCurve(curve).typical(1)), each_s)


def compare(share: float, for_s: float = 60.0) -> dict[str, Any]:
    """Return both on-time shares of one live run at `share` of its capacity, and their difference in points."""
    instants = instants_ns(share * CAPACITY, for_s)
    with live() as (request, server):
        spent_s = server.cpu_s()
        tally = replay(request, instants, DEADLINE_S)
        each_s = (server.cpu_s() - spent_s) / len(instants)
        learned = learned_of(request, server, each_s)
    simulated = simulate(instants, learned)
    of_live = tally.on_time(DEADLINE_S)
    return {
        "share": share,
        "arrivals": len(instants),
        "live": of_live,
        "simulated": simulated["on_time_for_callers"],
        "difference_points": 100 * abs(of_live - simulated["on_time_for_callers"]),
        "live_statuses": dict(tally.statuses),
        "live_p50_ms": tally.p_ms(0.5),
        "live_p99_ms": tally.p_ms(0.99),
        "send_lag_p99_ms": sorted(tally.send_lag_ns)[int(0.99 * len(tally.send_lag_ns))] / 1e6,
        "simulation": simulated,
        "curve": [[round(value, 5) for value in point] for point in learned.points],
        "way_ms": learned.way_s * 1e3,
        "each_ms": learned.each_s * 1e3,
    }


def enter(report: Report, for_s: float) -> None:
    """Enters simulator_difference_points, the worse of the shares."""
    found = [compare(share, for_s) for share in SHARES]
    for one in found:
        report.row(part="replay", **one)
        word = str(one["share"]).replace(".", "_")
        report.add(f"replay_on_time_at_{word}", one["live"])
        report.add(f"simulated_on_time_at_{word}", one["simulated"])
    report.add("simulator_difference_points", max(one["difference_points"] for one in found), "", "<= 5")


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The live system beside the simulator, over a recorded trace."
    )
    parser.add_argument(
        "--for", dest="for_s", type=float, default=60.0, help="seconds of load for each share"
    )
    parser.add_argument("--shares", type=float, nargs="+", default=list(SHARES), help="of the capacity")
    arguments = parser.parse_args()
    worst = -math.inf
    for share in arguments.shares:
        found = compare(share, arguments.for_s)
        worst = max(worst, found["difference_points"])
        print(json.dumps(found), flush=True)
    print(f"simulator_difference_points {worst:.1f} <= 5: {'yes' if worst <= 5 else 'NO'}")
    return 0 if worst <= 5 else 1


if __name__ == "__main__":
    sys.exit(main())

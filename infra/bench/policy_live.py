"""Ten minutes of arrivals against the live gateway, and the same arrivals through the simulator.

    python infra/bench/policy_live.py [--seconds 600] [--seed N]

Several functions on one gateway, whose set-ups and imports take seconds (they sleep), are called at the times of a trace.
The keep-alive policy moves them. Then the simulator replays the times at which the requests were sent, with the same
policy and the ladder that the gateway has measured. The benchmark compares the waiting times of both runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import aiohttp
from control import Control
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.scaling.idle_distribution import SharedPrior
from pilotflame.runtime.node.scaling.idle_period import QUIET_S
from pilotflame.runtime.node.scaling.ladder import Ladder, Rung
from pilotflame.runtime.node.scaling.ladder_simulator import LadderRun, Learned, Replay, run_together
from pilotflame.runtime.node.scaling.rung_figures import HoldingPrices, RungFigures
from policy_replays import SERVICE_S
from policy_traces import short_fleet
from report import Report, parser
from servers import start_pilotflame

SEED, SECONDS = 20261122, 600.0
# At these prices the ski-rental schedule steps down after some ten seconds, and again after about a minute.
PRICE_GB_HOUR, PRICE_WAITING_S = 10.0, 0.001
CALIBRATIONS = 3
RUNGS = (RungName.READY, RungName.ZYGOTE, RungName.LOCAL)
_GB = 1e9
PRICES = {
    "PILOTFLAME_PRICE_MEMORY_GB_HOUR": str(PRICE_GB_HOUR),
    "PILOTFLAME_PRICE_WAITING_S": str(PRICE_WAITING_S),
    # The simulator has the keep-alive policy alone.
    "PILOTFLAME_LEARN_UPSTREAMS": "false",
}
HANDLER = """
import asyncio, time
time.sleep({import_s})
imported = b"x" * 12_000_000
def setup(context):
    global kept
    time.sleep({setup_s})
    kept = b"y" * 24_000_000
async def handler(event):
    await asyncio.sleep({service_s})
"""


@dataclass
class Call:
    """One request that was answered."""

    sent_s: float
    took_s: float
    cold: bool


@dataclass
class Caller:
    """A function, the times at which it is called, and its answered calls."""

    name: str
    at_s: list[float]
    import_s: float
    setup_s: float
    calls: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def deploy(self, control: Control, **overrides: Any) -> None:
        text = HANDLER.format(import_s=self.import_s, setup_s=self.setup_s, service_s=SERVICE_S)
        control.deploy_code(self.name, text, concurrency=100, **{"scale.max": 1, **overrides})

    @cached_property
    def usual_s(self) -> float:
        """Return how long a request takes if a worker is ready."""
        return statistics.median([call.took_s for call in self.calls if not call.cold] or [SERVICE_S])

    def cold(self) -> list[Call]:
        """Return the requests that waited, except during the very first wake, which no policy decides."""
        ready_s = min(call.sent_s + call.took_s for call in self.calls)
        return [call for call in self.calls if call.cold and call.sent_s > ready_s]

    def waited_s(self) -> float:
        return sum(max(0.0, call.took_s - self.usual_s) for call in self.cold())


def callers(seed: int, seconds: float) -> list[Caller]:
    """Return functions with several arrival patterns, each with a slow import and a slow set-up."""
    fleet = short_fleet(seed, seconds)
    return [
        Caller(name, at_s, 1.0 + number % 3, 0.3 + 0.2 * (number % 4))
        for number, (name, at_s) in enumerate(fleet.items())
        if at_s
    ]


def calibrate(caller: Caller, url: str) -> None:
    """Wake a function from ZYGOTE and from LOCAL, so that the gateway measures what each rung holds and takes."""
    with contextlib.closing(Control(url)) as control:
        for rest in ("zygote", "local"):
            caller.deploy(control, **{"scale.rest": rest, "scale.idle_timeout_s": 0.6})
            for _ in range(CALIBRATIONS):
                _wait_for_rung(control, caller.name, rest)
                control.invoke(caller.name, {})


def _wait_for_rung(control: Control, name: str, rung: str) -> None:
    deadline_s = time.monotonic() + 60
    while control.status(name)["rung"] != rung:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{name} has not come down to {rung}")
        time.sleep(0.05)


def forget_histories(state: Path) -> None:
    """Keep what was measured of the rungs, and forget when calls came."""
    folder = state / "habits"
    for file in folder.glob("*.json"):
        file.unlink()
    for file in (folder / "functions").glob("*.json"):
        known = json.loads(file.read_text())
        kept = ("held_bytes", "wakes_s", "build_s", "devices")
        file.write_text(json.dumps({key: known[key] for key in kept}))


def figures_of(state: Path, name: str) -> RungFigures:
    """Return what the gateway has measured of a function's rungs."""
    history = json.loads((state / "habits" / "functions" / f"{name}.json").read_text())
    held = {RungName(rung): value for rung, value in history["held_bytes"].items()}
    wakes = {RungName(rung): tuple(values) for rung, values in history["wakes_s"].items()}
    return RungFigures(held, wakes, history["build_s"], history["devices"])


async def replay_live(fleet: Sequence[Caller], url: str) -> None:
    """Send each request at its time, whether or not earlier requests have succeeded."""
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        begin_s = time.monotonic() + 1.0
        async with asyncio.TaskGroup() as group:
            for caller in fleet:
                for at_s in caller.at_s:
                    group.create_task(_call(session, caller, begin_s + at_s))


async def _call(session: aiohttp.ClientSession, caller: Caller, at_s: float) -> None:
    await asyncio.sleep(at_s - time.monotonic())
    sent_s = time.monotonic()
    try:
        async with session.post(f"/invoke/{caller.name}", json={}) as answer:
            text = await answer.text()
    except (aiohttp.ClientError, TimeoutError) as error:
        caller.errors.append(repr(error))
        return
    if answer.status != 200:
        caller.errors.append(f"{answer.status} {text}")
        return
    cold = answer.headers.get("X-Cold-Start") == "true"
    caller.calls.append(Call(sent_s, time.monotonic() - sent_s, cold))


def replay_simulated(fleet: Sequence[Caller], figures: dict[str, RungFigures]) -> list[LadderRun]:
    """Replay the times at which the requests were sent.

    The policy plans with the gateway's ladder, whose wake times are 90th percentiles. The simulated waits are the means of
    the same measurements.
    """
    prices = HoldingPrices(PRICE_GB_HOUR / 3600 / _GB, 0.0, PRICE_WAITING_S)
    shared, replays = SharedPrior(), []
    for caller in fleet:
        found = figures[caller.name]
        planned = found.ladder(RUNGS, prices)
        arrivals = sorted(call.sent_s for call in caller.calls)
        policy = Learned(planned, shared)
        replays.append(Replay(arrivals, caller.usual_s, _paid(planned, found), policy, QUIET_S))
    return run_together(replays)


def _paid(planned: Ladder, found: RungFigures) -> Ladder:
    means = [0.0, *(statistics.fmean(found.wakes_s[rung]) for rung in RUNGS[1:])]
    wakes = accumulate(means, max)
    rungs = (Rung(rung.hold_per_s, wake_s) for rung, wake_s in zip(planned.rungs, wakes, strict=True))
    return Ladder(tuple(rungs), planned.wait_per_s)


def compare(report: Report, fleet: Sequence[Caller], simulated: Sequence[LadderRun]) -> None:
    for caller, run in zip(fleet, simulated, strict=True):
        report.row(
            function=caller.name, requests=len(caller.calls), cold_live=len(caller.cold()), cold_simulated=run.felt,
            waited_live_s=caller.waited_s(), waited_simulated_s=run.waited_s,
        )  # fmt: skip
        for text in caller.errors:
            report.fail(f"{caller.name}: {text}")
    live_s, simulated_s = sum(one.waited_s() for one in fleet), sum(one.waited_s for one in simulated)
    share = abs(live_s - simulated_s) / simulated_s
    report.add("live_waited_s", live_s, "s")
    report.add("live_vs_simulated_share", share, f"of {simulated_s:.1f} s simulated", "<= 0.1")


def run_live(fleet: Sequence[Caller]) -> dict[str, RungFigures]:
    """Measure the rungs on one gateway, replay on another with the same state, and return the figures of the rungs."""
    with tempfile.TemporaryDirectory(prefix="pilotflame-bench-") as parent:
        state = Path(parent) / "state"
        with start_pilotflame(PRICES, state=state) as server, ThreadPoolExecutor(len(fleet)) as pool:
            list(pool.map(lambda caller: calibrate(caller, server.url), fleet))
        forget_histories(state)
        with start_pilotflame(PRICES, state=state) as server:
            with contextlib.closing(Control(server.url)) as control:
                for caller in fleet:
                    caller.deploy(control)
            asyncio.run(replay_live(fleet, server.url))
        return {caller.name: figures_of(state, caller.name) for caller in fleet}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=SECONDS)
    options.add_argument("--seed", type=int, default=SEED)
    arguments = options.parse_args()
    report = Report("bench-policy-live")
    fleet = callers(arguments.seed, arguments.seconds)
    figures = run_live(fleet)
    compare(report, fleet, replay_simulated(fleet, figures))
    report.note(f"seed {arguments.seed}, {arguments.seconds:.0f} s")
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

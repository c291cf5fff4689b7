"""Workers ahead of need: after a warm-up, a schedule and an upstream call, how many calls are cold.

python infra/bench/prewarm.py [--calls 200] [--rounds 30] [--minutes 2]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from control import Control
from report import Report
from servers import start_pilotflame

HELLO = "def handler(event):\n    return event"
SCHEDULE = '[[schedule]]\ncron = "* * * * *"\nworkers = 1\nfor_s = 5\n'
# The condition: the pair counts as learned after this number of rounds.
LEARNED_AFTER = 20
AHEAD_S, ROUND_S, FOLLOWS_S = 1.0, 1.5, 0.3
QUICK = {"scale.idle_timeout_s": 0.4}


@contextmanager
def deployed() -> Iterator[Control]:
    with start_pilotflame() as server, tempfile.TemporaryDirectory(prefix="pilotflame-prewarm-") as folder:
        control = Control(server.url)
        try:
            for name in ("burst", "upstream", "downstream", "scheduled"):
                home = Path(folder) / name
                home.mkdir()
                (home / "handler.py").write_text(HELLO)
                if name == "scheduled":
                    (home / "pilotflame.toml").write_text(SCHEDULE)
                control.deploy(str(home), name=name, **QUICK)
            yield control
        finally:
            control.close()


async def burst(control: Control, calls: int) -> int:
    """Send all calls at once. Return how many waited for a worker's start, as `X-Cold-Start` says."""
    limits = httpx.Limits(max_connections=calls)
    async with httpx.AsyncClient(base_url=control.url, limits=limits, timeout=60.0) as client:
        answers = await asyncio.gather(*(client.post("/invoke/burst", json=n) for n in range(calls)))
    if wrong := [answer.status_code for answer in answers if answer.status_code != 200]:
        raise RuntimeError(f"{len(wrong)} of {calls} calls were not answered: {wrong[:5]}")
    return sum(answer.headers["x-cold-start"] == "true" for answer in answers)


def warm_up(report: Report, control: Control, calls: int, rounds: int = 3) -> None:
    warned: list[int] = []
    unwarned: list[int] = []
    for _ in range(rounds):
        for cold, ahead in ((unwarned, False), (warned, True)):
            control.wait_for("burst", workers=0)
            if ahead:
                control.request("POST", "/v2/burst/warmup?for_s=5")
                time.sleep(AHEAD_S)
            cold.append(asyncio.run(burst(control, calls)))
    report.add("cold_calls_after_warmup", max(warned), f"of {calls}", "== 0")
    report.add("cold_calls_without_warmup", median(unwarned), f"of {calls}")


def pair(report: Report, control: Control, rounds: int) -> None:
    """Call upstream, then downstream. Downstream is at zero before each round."""
    cold: list[bool] = []
    for _ in range(LEARNED_AFTER + rounds):
        control.wait_for("downstream", workers=0)
        began_s = time.monotonic()
        control.invoke("upstream", 1)
        time.sleep(FOLLOWS_S)
        cold.append(control.invoke("downstream", 1).cold)
        time.sleep(max(0.0, ROUND_S - (time.monotonic() - began_s)))
    report.add("cold_share_while_learning", sum(cold[:LEARNED_AFTER]) / LEARNED_AFTER)
    report.add("cold_share_of_learned_pair", sum(cold[LEARNED_AFTER:]) / rounds, "", "<= 0.1")


def schedule(report: Report, control: Control, minutes: int) -> None:
    """Compare the times of starts with the minutes at which the schedule fires."""
    late_s: list[float] = []
    for _ in range(minutes):
        due = math.ceil(time.time() / 60.0) * 60.0
        time.sleep(due + 2.0 - time.time())
        decisions: list[dict[str, Any]] = control.request(
            "GET", f"/v1/functions/scheduled/decisions?since={due - 1.0}"
        )["decisions"]
        starts = [
            datetime.fromisoformat(one["at"]).timestamp()
            for one in decisions
            if one["action"] == "start" and one["cause"].startswith("schedule")
        ]
        late_s.append(min(starts, default=math.inf) - due)
    report.add("schedule_late_s", max(late_s, key=abs), "s", "<= 1")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument(
        "--rounds", type=int, default=30, help=f"of the pair, after {LEARNED_AFTER} to learn it"
    )
    parser.add_argument("--minutes", type=int, default=2, help="for how many minutes the schedule is watched")
    arguments = parser.parse_args()
    report = Report("bench-prewarm")
    with deployed() as control:
        with report.part("warm-up"):
            warm_up(report, control, arguments.calls)
        with report.part("upstream pair"):
            pair(report, control, arguments.rounds)
        with report.part("schedule"):
            schedule(report, control, arguments.minutes)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

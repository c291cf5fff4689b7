"""Workers ahead of need: after a warm-up, a schedule and an upstream call, how many calls are cold.

python infra/bench/prewarm.py [--calls 200] [--rounds 30] [--minutes 2]
"""

from __future__ import annotations

import math
import sys
import time
from datetime import datetime
from typing import Any

from control import Control, gateway
from load import Request, burst
from report import Report, parser

HELLO = "def handler(event):\n    return event"
SCHEDULE = {"cron": "* * * * *", "workers": 1, "for_s": 5}
# A pair counts as learned after this number of rounds.
LEARNED_AFTER = 20
AHEAD_S, ROUND_S, FOLLOWS_S = 1.0, 1.5, 0.3
WARM_UP_ROUNDS = 3
QUICK = {"scale.idle_timeout_s": 0.4}


def warm_up(report: Report, control: Control, calls: int) -> None:
    """Warm up a function at zero, and then send all calls at one instant."""
    cold: list[int] = []
    for _ in range(WARM_UP_ROUNDS):
        control.wait_for("burst", workers=0)
        control.request("POST", "/v2/burst/warmup?for_s=5")
        time.sleep(AHEAD_S)
        answers = burst([Request(f"{control.url}/invoke/burst", body=b"1", capture="X-Cold-Start")] * calls)
        cold.append(answers.captured.count("true"))
    report.add("cold_calls_after_warmup", max(cold), f"of {calls}", "== 0")


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
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=200)
    options.add_argument(
        "--rounds", type=int, default=30, help=f"of the pair, after {LEARNED_AFTER} to learn it"
    )
    options.add_argument(
        "--minutes", type=int, default=2, help="for how many minutes the schedule is watched"
    )
    arguments = options.parse_args()
    report = Report("bench-prewarm")
    with gateway() as (_, control):
        for name in ("burst", "upstream", "downstream", "scheduled"):
            control.deploy_code(name, HELLO, schedule=[SCHEDULE] * (name == "scheduled"), **QUICK)
        with report.part("warm-up"):
            warm_up(report, control, arguments.calls)
        with report.part("upstream pair"):
            pair(report, control, arguments.rounds)
        with report.part("schedule"):
            schedule(report, control, arguments.minutes)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

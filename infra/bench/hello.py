"""The price of a warm hello: ours beside a bare echo (the floor) and beside LitServe, in interleaved rounds.

python infra/bench/hello.py                    # all three
python infra/bench/hello.py --without-ours     # echo and LitServe alone
python infra/bench/hello.py --sweep-litserve   # which settings are LitServe's best on this machine
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from contestant import HELLO, Contestant
from control import Control
from report import Report
from servers import LitServeSettings, start_echo, start_litserve, start_pilotflame

CALLERS = 32
FUNCTION = Path(__file__).with_name("functions") / "hello"
SETTINGS = (
    LitServeSettings(1, 1, fast_queue=False),
    LitServeSettings(1, 1, fast_queue=True),
    LitServeSettings(1, 2, fast_queue=False),
    LitServeSettings(1, 2, fast_queue=True),
    LitServeSettings(2, 1, fast_queue=False),
    LitServeSettings(2, 1, fast_queue=True),
    LitServeSettings(2, 2, fast_queue=False),
    LitServeSettings(2, 2, fast_queue=True),
    LitServeSettings(1, 1, fast_queue=True, max_batch_size=16, batch_timeout_s=0.001),
    LitServeSettings(1, 2, fast_queue=True, max_batch_size=16, batch_timeout_s=0.001),
    LitServeSettings(1, 2, fast_queue=False, max_batch_size=8, batch_timeout_s=0.001),
    LitServeSettings(1, 2, fast_queue=True, enable_async=True),
)
# The fastest setting in one of three sweeps here (2 cores), and level with others in the other two. Settings with
# two API servers lie within each other's spread (1,040 to 1,950 requests/s): the servers share one listening
# socket, so chance decides how many callers each server gets. Hence the second ratio, to LitServe's best round.
FASTEST = LitServeSettings(2, 2, fast_queue=True)


@dataclass(frozen=True)
class Plan:
    """How long and how hard."""

    rounds: int = 7
    callers: int = CALLERS
    single_s: float = 1.0
    loaded_s: float = 2.0
    ours: bool = True


@contextmanager
def contestants(*, ours: bool, litserve: LitServeSettings | None) -> Iterator[dict[str, Contestant]]:
    """Run all servers at once, so that rounds can be interleaved. An idle server must cost nothing."""
    with ExitStack() as stack:
        entered = {"echo": Contestant("echo", stack.enter_context(start_echo()), "/", expect=HELLO)}
        if ours:
            server = stack.enter_context(start_pilotflame())
            control = Control(server.url)
            control.deploy(str(FUNCTION), name="hello")
            control.close()
            entered["ours"] = Contestant("ours", server, "/invoke/hello")
        if litserve is not None:
            server = stack.enter_context(start_litserve(litserve))
            entered["litserve"] = Contestant("litserve", server, "/predict")
        yield entered


def run_rounds(entered: dict[str, Contestant], report: Report, plan: Plan) -> None:
    """Play the rounds. Each round starts with the next contestant."""
    order = list(entered.values())
    for contestant in order:
        contestant.warm_up(plan.callers, 1.0)
    for contestant in order:
        report.add(f"{contestant.name}_idle_cpu_share", contestant.idle_share())
    for number in range(plan.rounds):
        for contestant in order[number % len(order) :] + order[: number % len(order)]:
            done = contestant.run_round(plan.callers, plan.single_s, plan.loaded_s)
            report.row(round=number, contestant=contestant.name, **asdict(done))


def enter_each(report: Report, contestant: Contestant, callers: int) -> None:
    """One contestant's own figures: medians over the rounds."""
    name = contestant.name
    report.add(f"{name}_p50_ms", contestant.median("p50_ms"), "ms")
    report.add(f"{name}_p99_ms", contestant.median("p99_ms"), "ms")
    report.add(f"{name}_rps_{callers}", contestant.median("per_second"), "/s")
    report.add(f"{name}_cpu_us_per_request", contestant.median("cpu_us"), "us")
    report.add(f"{name}_generator_share", contestant.median("generator_share"))


def enter_ratios(report: Report, entered: dict[str, Contestant]) -> None:
    """Ours against the others."""
    ours, echo, litserve = entered["ours"], entered["echo"], entered["litserve"]
    p50_ms, floor_ms = ours.median("p50_ms"), echo.median("p50_ms")
    report.add("hello_p50_ratio", p50_ms / floor_ms, "x echo", "<= 3")
    report.add("hello_p50_above_echo_ms", p50_ms - floor_ms, "ms", "<= 1")
    report.add(
        "hello_rps_vs_litserve", ours.median("per_second") / litserve.median("per_second"), "x", ">= 2"
    )
    best = max(done.per_second for done in litserve.rounds)
    report.add("hello_rps_vs_litserve_best_round", ours.median("per_second") / best, "x")
    enter_cpu_share(report, entered)


def enter_cpu_share(report: Report, entered: dict[str, Contestant], target: str = "") -> None:
    """Requests per second of processor time, ours over echo's."""
    ours, echo = entered["ours"], entered["echo"]
    report.add("echo_cpu_share", echo.median("cpu_us") / ours.median("cpu_us"), "of echo's req/cpu-s", target)


def measure(report: Report, plan: Plan) -> None:
    """Enters the figures of all contestants and our ratios."""
    report.note(f"litserve: {FASTEST}; {plan.rounds} rounds, medians; the generator is a third process")
    with contestants(ours=plan.ours, litserve=FASTEST) as entered:
        run_rounds(entered, report, plan)
    for contestant in entered.values():
        enter_each(report, contestant, plan.callers)
    if "ours" in entered:
        enter_ratios(report, entered)


def sweep(arguments: argparse.Namespace) -> bool:
    """Each setting of LitServe alone on the machine, one after the other, in --rounds passes."""
    report = Report("litserve-settings", packages=("litserve", "fastapi", "uvicorn"))
    seen: dict[LitServeSettings, list[Contestant]] = {SETTINGS[index]: [] for index in arguments.settings}
    for number in range(arguments.rounds):
        for settings, runs in seen.items():
            with start_litserve(settings) as server:
                contestant = Contestant(str(settings), server, "/predict")
                contestant.warm_up(arguments.callers, 1.0)
                idle = contestant.idle_share()
                done = contestant.run_round(arguments.callers, arguments.single_s, arguments.loaded_s)
            report.row(round=number, settings=str(settings), idle_cpu_share=idle, **asdict(done))
            runs.append(contestant)
    for settings, runs in seen.items():
        whole = runs[0]
        whole.rounds = [done for run in runs for done in run.rounds]
        report.add(f"{settings}: p50", whole.median("p50_ms"), "ms")
        report.add(f"{settings}: rps", whole.median("per_second"), "/s")
    return report.finish()


def main() -> int:
    parser = argparse.ArgumentParser(description="What a warm hello costs, beside an echo and LitServe.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callers", type=int, default=CALLERS)
    parser.add_argument("--single-s", type=float, default=1.0, help="per round, with one caller")
    parser.add_argument("--loaded-s", type=float, default=2.0, help="per round, with --callers")
    parser.add_argument("--without-ours", action="store_true")
    parser.add_argument("--sweep-litserve", action="store_true")
    everything = list(range(len(SETTINGS)))
    parser.add_argument("--settings", type=int, nargs="+", default=everything, help="indices in SETTINGS")
    arguments = parser.parse_args()
    if arguments.sweep_litserve:
        return 0 if sweep(arguments) else 1
    report = Report("hello", packages=("litserve", "fastapi", "uvicorn"))
    ours = not arguments.without_ours
    measure(report, Plan(arguments.rounds, arguments.callers, arguments.single_s, arguments.loaded_s, ours))
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

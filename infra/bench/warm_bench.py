"""`make bench-warm`: the warm path beside LitServe at its best options: throughput, overload, two tenants, streams.

    python infra/bench/warm_bench.py [--only PART ...] [--rounds N] [--quick]

minilm: sentence embeddings in a closed loop, also beside the bare work without a server. sleep: a handler whose batch of b
takes (20 + 0.5 b) ms. overload: an open loop at 1.2 times the highest rate of one worker of that handler. A request is on
time if its answer is right and arrives within five times the duration of a batch of one. tenants, streams, and slow (short
calls among long ones): our gateway alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import warm_slow
import warm_streams
import warm_tenants
import work
from control import Control, gateway
from load import REFUSED, Request, load_apart
from percentiles import median
from pilotflame.runtime.command.commands import minilm
from report import Report, parser
from rounds import rotated
from servers import Server, ServerError, start_litserve
from subject_process import SubjectProcess

OURS, LITSERVE = "pilotflame", "litserve"
BODIES: dict[str, Any] = {"minilm": {"text": minilm.TEXT}, "sleep": {"value": 7}}
LIMIT = 32
"""The largest batch of the handlers."""
TRIAL_S, SETTLE_S = 1.5, 0.2
OVERLOAD, DEADLINES = 1.2, 5.0
BARE_BATCHES = 8
# As in the servers, malloc keeps freed blocks. Without this the bare model is a quarter slower.
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
# LitServe needs a wait above 0 to form batches.
CANDIDATES: dict[str, list[dict[str, Any]]] = {
    OURS: [{"workers": 1}, {"workers": 2}],
    LITSERVE: [
        {"workers": 1, "fast_queue": True, "wait_ms": 1},
        {"workers": 2, "fast_queue": True, "wait_ms": 1},
        {"workers": 2, "fast_queue": True, "wait_ms": 10},
        {"workers": 2, "fast_queue": True, "wait_ms": 10, "api_servers": 2},
        {"workers": 2, "wait_ms": 1},
    ],
}


@dataclass(frozen=True)
class Plan:
    """The number of rounds, the seconds of the closed and of the open loop, the most candidates that are tried, and the
    number of random sequences."""

    rounds: int = 3
    closed_s: float = 1.5
    open_s: float = 5.0
    candidates: int = 10
    seeds: int = 20


@dataclass(frozen=True)
class Subject:
    """A running server with one handler, and the request that it is sent."""

    name: str
    server: Server
    request: Request

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let the server run during the block. It is paused otherwise, because some servers use CPU time without requests."""
        self.server.resume()
        # Timers that came due during the pause fire before anything is measured.
        time.sleep(SETTLE_S)
        try:
            yield
        finally:
            self.server.pause()


@contextmanager
def started(name: str, handler: str, options: dict[str, Any]) -> Iterator[Subject]:
    """Start a server, check its answer, and warm it up."""
    body = json.dumps(BODIES[handler]).encode()
    with ExitStack() as stack:
        if name == OURS:
            server, control = stack.enter_context(gateway())
            deploy(control, handler, options["workers"])
            url = f"{server.url}/invoke/{handler}"
        else:
            env = {**minilm.OFFLINE, "TOKENIZERS_PARALLELISM": "false"}
            given = {"handler": handler, "model": str(minilm.model_folder()), "batch": LIMIT, **options}
            server = stack.enter_context(start_litserve(given, body, env))
            url = f"{server.url}/predict"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=60) as answer:
            check(handler, json.loads(answer.read()))
        subject = Subject(name, server, Request(url, body=body))
        for callers in (1, 8, LIMIT):
            tally = load_apart(subject.request, callers=callers, duration_s=0.7)
            if not tally.clean:
                raise ServerError(f"{name}, {handler}: {tally.summary()}")
        yield subject


def deploy(control: Control, handler: str, workers: int) -> None:
    """Deploy our function with exactly `workers` workers."""
    settings: dict[str, Any] = {"scale.min": workers, "scale.max": workers, "threads": 1}
    if handler == "minilm":
        settings["snapshot"] = str(minilm.model_folder())
    control.deploy(str(work.FOLDERS[handler]), name=handler, **settings)
    control.wait_for(handler, workers=workers)


def check(handler: str, answer: Any) -> None:
    """Raise if the answer is wrong."""
    right = answer == BODIES["sleep"]["value"] if handler == "sleep" else (
        minilm.difference(answer["embedding"], minilm.reference([minilm.TEXT])[0]) <= minilm.TOLERANCE
    )  # fmt: skip
    if not right:
        raise ServerError(f"{handler} was answered with {str(answer)[:200]}")


def best(report: Report, plan: Plan, name: str, handler: str) -> dict[str, Any]:
    """Measure each candidate alone on the machine, and return the options with the highest rate for 32 callers."""
    rates: list[float] = []
    for options in CANDIDATES[name][: plan.candidates]:
        with started(name, handler, options) as subject:
            rates.append(load_apart(subject.request, callers=LIMIT, duration_s=TRIAL_S).per_second)
    found = CANDIDATES[name][rates.index(max(rates))]
    report.note(f"{handler}: {name} with {found}; tried: {', '.join(f'{rate:.0f}/s' for rate in rates)}")
    return found


@contextmanager
def both(report: Report, plan: Plan, handler: str) -> Iterator[list[Subject]]:
    """Run both servers at their best options, each paused until its turn."""
    options = {name: best(report, plan, name, handler) for name in CANDIDATES}
    with ExitStack() as stack:
        subjects = [stack.enter_context(started(name, handler, given)) for name, given in options.items()]
        for subject in subjects:
            subject.server.pause()
        yield subjects


def closed(
    report: Report,
    plan: Plan,
    handler: str,
    callers: int,
    target: str,
    bare: Callable[[], float] | None = None,
) -> None:
    """Enter the rates of both servers in a closed loop, and their ratio.

    `bare` returns the rate of the work without a server. It is measured after each of our turns.
    """
    rates: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    shares: list[float] = []
    with both(report, plan, handler) as subjects:
        for number in range(plan.rounds):
            for subject in rotated(subjects, number):
                with subject.turn():
                    tally = load_apart(subject.request, callers=callers, duration_s=plan.closed_s)
                rates[subject.name].append(tally.per_second)
                report.row(part=handler, round=number, subject=subject.name, **tally.summary())
                if bare is not None and subject.name == OURS:
                    shares.append(tally.per_second / bare())
    for name, found in rates.items():
        report.add(f"{handler}_{name}_rps_{callers}", median(found), "/s")
    ratio = median(rates[OURS]) / median(rates[LITSERVE])
    report.add(f"{handler}_rps_vs_litserve_{callers}", ratio, "x", target)
    if shares:
        report.add(f"{handler}_share_of_bare_model", median(shares), "of the bare work", ">= 0.9")


def minilm_part(report: Report, plan: Plan) -> None:
    """Measure the closed loop of 32 callers, also beside the bare work, which runs batches of 16 in one
    process for each core.
    """
    given = {"model": str(minilm.model_folder()), "threads": 1, "event": BODIES["minilm"]}
    batch = LIMIT // 2
    with ExitStack() as stack:
        processes = [
            stack.enter_context(SubjectProcess("work:BareWork", KEEP_FREED, handler="minilm", **given))
            for _ in os.sched_getaffinity(0)
        ]
        threads = stack.enter_context(ThreadPoolExecutor(len(processes)))

        def rate(count: int = BARE_BATCHES) -> float:
            seconds = threads.map(lambda one: one.turn(batch=batch, count=count), processes)
            return float(sum(count * batch / each for each in seconds))

        # The first batch warms up.
        rate(1)
        closed(report, plan, "minilm", LIMIT, ">= 1.1", rate)


def overload(report: Report, plan: Plan) -> None:
    """Measure the open loop, with one worker of each server.

    Our gateway gets the deadline in X-Request-Timeout; LitServe has no such header.
    """
    deadline_s, rate = DEADLINES * batch_s(1), OVERLOAD * LIMIT / batch_s(LIMIT)
    with ExitStack() as stack:
        for name in (OURS, LITSERVE):
            options = next(one for one in CANDIDATES[name] if one["workers"] == 1)
            subject = stack.enter_context(started(name, "sleep", options))
            request = with_deadline(subject.request, deadline_s) if name == OURS else subject.request
            tally = load_apart(request, rate=rate, duration_s=plan.open_s, seed=12, warmup_s=0.4)
            report.row(part="overload", subject=name, **tally.summary())
            target = ">= 0.75" if name == OURS else ""
            report.add(f"overload_{name}_on_time_share", tally.on_time(deadline_s), "", target)
            if name == OURS:
                refused = sum(tally.statuses.get(status, 0) for status in REFUSED)
                stated = sum(bool(value) for value in tally.captured)
                report.add("refusals_with_retry_after", stated / max(1, refused), f"of {refused}", "== 1")
                again = load_apart(request, rate=rate, duration_s=plan.open_s, seed=7, retry=True)
                repeated = sum(again.second_statuses.values())
                success = again.second_statuses.get(200, 0) / max(1, repeated)
                report.add("retry_success", success, f"of {repeated}", ">= 0.9")
            subject.server.pause()


def batch_s(size: int) -> float:
    """Return how long a batch of the handler `sleep` takes: see functions/sleep/handler.py."""
    return 0.020 + 0.0005 * size


def with_deadline(request: Request, deadline_s: float) -> Request:
    headers = {**request.headers, "X-Request-Timeout": f"{deadline_s:.4f}"}
    return replace(request, headers=headers, capture="Retry-After")


def tenants(report: Report, plan: Plan) -> None:
    with gateway() as (server, control):
        deploy(control, "sleep", 1)
        request = Request(f"{server.url}/invoke/sleep", body=json.dumps(BODIES["sleep"]).encode())
        warm_tenants.measure(report, server, request, 2.5 * plan.open_s)


def streams(report: Report, plan: Plan) -> None:
    with gateway() as (server, control):
        control.deploy_code(
            "streams", warm_streams.HANDLER, concurrency=16, **{"scale.min": 1, "scale.max": 1}
        )
        control.wait_for("streams", workers=1)
        warm_streams.measure(report, server, plan.closed_s)


def slow(report: Report, plan: Plan) -> None:
    with gateway() as (server, control):
        warm_slow.measure(report, server, control, plan.seeds)


PARTS: dict[str, Callable[[Report, Plan], None]] = {
    "minilm": minilm_part,
    "sleep": lambda report, plan: closed(report, plan, "sleep", 8, ">= 1.15"),
    "overload": overload,
    "tenants": tenants,
    "streams": streams,
    "slow": slow,
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options.add_argument("--rounds", type=int, default=Plan.rounds, help="of the closed loops")
    options.add_argument(
        "--quick", action="store_true", help="one short round of each part, at the first options"
    )
    arguments = options.parse_args()
    os.environ.update(minilm.OFFLINE)
    report = Report("bench-warm", packages=("torch", "transformers", "litserve"))
    plan = Plan(1, 1.0, 2.0, 1, 3) if arguments.quick else Plan(arguments.rounds)
    for name in arguments.only:
        with report.part(name):
            PARTS[name](report, plan)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

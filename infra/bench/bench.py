"""`make bench`: cold start, the memory of a fourth worker, and the cost of a warm call (hello.py).

A cold start is the time from zero workers to the first correct answer over HTTP. A warm request and a fresh process stand
beside it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median

import hello
from control import Control, Reply, gateway
from pilotflame.runtime.command.commands import minilm
from pilotflame.runtime.command.commands.fresh_process import first_answer
from report import Report, parser

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "text-embedding"
NAME = "text-embedding"
EVENT = {"text": minilm.TEXT}
WARM_REQUESTS = 5
FRESH_EVERY = 8
WORKERS = 4
CALL_ROUNDS = 10


def cold_start(report: Report, rounds: int) -> None:
    """Enter cold_start_ratio, cold_minus_warm_ms and the times that they are computed from."""
    expected = minilm.reference([minilm.TEXT])[0]
    cold: list[Reply] = []
    warm: list[float] = []
    fresh: list[float] = []
    with deployed() as control:
        for number in range(rounds):
            control.wait_for(NAME, workers=0, standby=True)
            cold.append(control.invoke(NAME, EVENT))
            after = [control.invoke(NAME, EVENT) for _ in range(WARM_REQUESTS)]
            check([cold[-1], *after], expected)
            warm.append(median(reply.ms for reply in after))
            if number % FRESH_EVERY == 0:
                fresh.append(fresh_process_ms(expected))
            report.row(round=number + 1, cold_ms=cold[-1].ms, warm_ms=warm[-1])
    cold_ms, warm_ms, fresh_ms = median(reply.ms for reply in cold), median(warm), median(fresh)
    report.add("cold_start_ratio", fresh_ms / cold_ms, "x", ">= 100")
    report.add("cold_minus_warm_ms", cold_ms - warm_ms, "ms", "<= 25")
    report.add("cold_ms", cold_ms, "ms")
    report.add("warm_ms", warm_ms, "ms")
    report.add("fresh_process_ms", fresh_ms, "ms")
    report.add("cold_rounds", len(cold), "", ">= 20")


@contextmanager
def deployed(**overrides: object) -> Iterator[Control]:
    """Run a gateway with the text-embedding template on the real model, at zero workers."""
    os.environ.update(minilm.OFFLINE)
    settings = {
        "snapshot": str(minilm.model_folder()),
        "name": NAME,
        "scale.idle_timeout_s": 0.4,
        **overrides,
    }
    with gateway() as (_, control):
        control.deploy(str(TEMPLATE), **settings)
        yield control


def check(replies: list[Reply], expected: list[float]) -> None:
    """Raise unless the first reply is cold, all others are warm, and every embedding is right."""
    if not replies[0].cold or any(reply.cold for reply in replies[1:]):
        raise RuntimeError("the first request of a round must be cold and the others warm")
    worst = max(minilm.difference(reply.body["embedding"], expected) for reply in replies)
    if worst > minilm.TOLERANCE:
        raise RuntimeError(f"an embedding differs from plain transformers by {worst:.2e}")


def fresh_process_ms(expected: list[float]) -> float:
    """Return the time from the start of an interpreter to the first correct answer over HTTP."""
    answer, ms = first_answer(TEMPLATE, minilm.model_folder(), EVENT)
    if minilm.difference(answer["embedding"], expected) > minilm.TOLERANCE:
        raise RuntimeError("the fresh process answered wrongly")
    return ms


def fourth_worker(report: Report) -> None:
    """Enter fourth_worker_uss_mb: the private memory of the last of four workers, after all have served."""
    with deployed(**{"scale.idle_timeout_s": 30.0, "scale.max": WORKERS}) as control:
        control.request("POST", f"/v2/{NAME}/warmup?workers={WORKERS}")
        control.wait_for(NAME, workers=WORKERS)
        serve_all(control)
        processes = control.status(NAME, memory=True)["processes"]
    workers = [process for process in processes if process["role"] == "worker"]
    last = max(workers, key=lambda process: int(process["name"].rpartition("-")[2]))
    report.add("fourth_worker_uss_mb", last["uss_mb"], "MB", "< 60")


def serve_all(control: Control) -> None:
    """Call until each worker has run the model. A worker that has not run it holds less memory."""
    served: set[str] = set()

    def call(_: int) -> None:
        with closing(Control(control.url)) as own:
            served.update(own.invoke(NAME, EVENT).worker for _ in range(WORKERS))

    for _ in range(CALL_ROUNDS):
        with ThreadPoolExecutor(2 * WORKERS) as pool:
            list(pool.map(call, range(2 * WORKERS)))
        if len(served) >= WORKERS:
            return
    raise RuntimeError(f"only {sorted(served)} of {WORKERS} workers were given work")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=25, help="cold starts (at least 20)")
    options.add_argument("--hello-rounds", type=int, default=7)
    arguments = options.parse_args()
    report = Report("bench", packages=("torch", "transformers", "litserve"))
    with report.part("cold"):
        cold_start(report, arguments.rounds)
    with report.part("fourth worker"):
        fourth_worker(report)
    with report.part("hello"):
        hello.measure(report, arguments.hello_rounds)
    return report.finish(arguments)


if __name__ == "__main__":
    sys.exit(main())

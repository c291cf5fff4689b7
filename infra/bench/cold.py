"""Cold start: zero workers to the first correct answer over HTTP, beside a warm request and a fresh process."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from control import Control, Reply
from memory import held, print_holdings
from pilotflame.runtime.commands import minilm
from pilotflame.runtime.commands.fresh_process import first_answer
from report import Report
from rich.console import Console
from servers import start_pilotflame

TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "text-embedding"
NAME = "text-embedding"
EVENT = {"text": minilm.TEXT}
WARM_REQUESTS = 5
FRESH_EVERY = 8


def measure(report: Report, rounds: int) -> None:
    """Enters cold_start_ratio, cold_minus_warm_ms and the times that they are computed from."""
    expected = minilm.reference([minilm.TEXT])[0]
    cold: list[Reply] = []
    warm: list[float] = []
    fresh: list[float] = []
    with deployed() as control:
        show_zero(control)
        for number in range(rounds):
            control.wait_for(NAME, workers=0, standby=True)
            cold.append(control.invoke(NAME, EVENT))
            after = [control.invoke(NAME, EVENT) for _ in range(WARM_REQUESTS)]
            check([cold[-1], *after], expected)
            warm.append(median(reply.ms for reply in after))
            if number % FRESH_EVERY == 0:
                fresh.append(fresh_process_ms(expected))
            report.row(round=number + 1, cold_ms=cold[-1].ms, warm_ms=warm[-1], **cold[-1].phases_ms)
    enter(report, cold, warm, fresh)


@contextmanager
def deployed(**overrides: object) -> Iterator[Control]:
    """A gateway with the text-embedding template on the real model, at zero workers."""
    os.environ.update(minilm.OFFLINE)
    with start_pilotflame() as server:
        control = Control(server.url)
        try:
            settings = {
                "snapshot": str(minilm.model_folder()),
                "name": NAME,
                "scale.idle_timeout_s": 0.4,
                **overrides,
            }
            control.deploy(str(TEMPLATE), **settings)
            yield control
        finally:
            control.close()


def check(replies: list[Reply], expected: list[float]) -> None:
    """Raise unless the first reply is cold, all others are warm, and every embedding is right."""
    if not replies[0].cold or any(reply.cold for reply in replies[1:]):
        raise RuntimeError("the first request of a round must be cold and the others warm")
    worst = max(minilm.difference(reply.body["embedding"], expected) for reply in replies)
    if worst > minilm.TOLERANCE:
        raise RuntimeError(f"an embedding differs from plain transformers by {worst:.2e}")


def enter(report: Report, cold: list[Reply], warm: list[float], fresh: list[float]) -> None:
    cold_ms, warm_ms, fresh_ms = median(reply.ms for reply in cold), median(warm), median(fresh)
    report.add("cold_start_ratio", fresh_ms / cold_ms, "x", ">= 100")
    report.add("cold_minus_warm_ms", cold_ms - warm_ms, "ms", "<= 25")
    report.add("cold_ms", cold_ms, "ms")
    report.add("cold_worst_ms", max(reply.ms for reply in cold), "ms")
    report.add("cold_best_ms", min(reply.ms for reply in cold), "ms")
    report.add("warm_ms", warm_ms, "ms")
    report.add("fresh_process_ms", fresh_ms, "ms")
    report.add("cold_rounds", len(cold), "", ">= 20")
    for phase in cold[0].phases_ms:
        report.add(f"cold_{phase}_ms", median(reply.phases_ms.get(phase, 0.0) for reply in cold), "ms")


def show_zero(control: Control) -> None:
    """Print the processes and their memory before the first request. None of these processes may hold a page of the weights."""
    status = control.wait_for(NAME, workers=0, standby=True)
    processes = control.status(NAME, memory=True)["processes"]
    print_holdings([held(process["pid"]) for process in processes], "held at zero workers")
    weights = sum(mapped_kb(process["pid"], ".safetensors") for process in processes)
    Console().print(
        f"workers: {status['workers']}; resident pages of the weights in these processes: {weights} kB"
    )
    if any(process["role"] == "worker" for process in processes) or weights:
        raise RuntimeError("zero is not zero")


def mapped_kb(pid: int, suffix: str) -> int:
    """Resident kilobytes of mappings of files with this ending, from smaps."""
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            ours = line.endswith(suffix)
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def fresh_process_ms(expected: list[float]) -> float:
    """From starting the interpreter to the first correct answer over HTTP."""
    answer, ms = first_answer(TEMPLATE, minilm.model_folder(), EVENT)
    if minilm.difference(answer["embedding"], expected) > minilm.TOLERANCE:
        raise RuntimeError("the fresh process answered wrongly")
    return ms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    report = Report("cold", packages=("torch", "transformers"))
    measure(report, arguments.rounds)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

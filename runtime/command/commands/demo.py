"""The command that times cold starts of a real model on this machine: `pilotflame demo`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import ceil
from statistics import median
from typing import Any

import click
import psutil

from ....errors import GatewayError
from ..client import display, options
from ..client.client import Client
from ..client.function_template import TEMPLATES
from . import minilm
from .fresh_process import first_answer
from .trial import private_gateway

NAME = "text-embedding"
EVENT = {"text": minilm.TEXT}
BODY = json.dumps(EVENT).encode()
# A worker ends after this short idle time, so that the next request finds no worker.
IDLE_TIMEOUT_S = 0.2
# The maximum wait in seconds until no worker runs. It is also the number of lines to read from the console's stream,
# which has one line each second.
REST_S = 60
WARM_CALLS = 3
FRESH_PROCESSES = 3
MEASURED_WORKERS = 2
CALL_ROUNDS = 10
BAR_COLUMNS = 24
MEANING = {
    "queue": "the request is read, a worker is asked for",
    "fork": "the worker's process is there",
    "restore": "the weights are mapped",
    "dispatch": "the request is sent to the worker",
    "link": "to the worker and back",
    "wait": "until the batch starts",
    "exec": "tokenise, forward pass, answer",
    "respond": "the response is written",
}


@dataclass(frozen=True)
class TimedCall:
    """An answered request, with the time that its caller waited and the gateway's measured phases."""

    ms: float
    cold: bool
    phases_ms: Mapping[str, float]


@click.command()
@click.option("--starts", type=click.IntRange(1, 100_000), default=100, help="How many cold starts to time.")
@options.as_json
def demo(*, starts: int, as_json: bool) -> None:
    """Time cold starts of a real model on this machine, and print where each millisecond went.

    Deploys sentence embeddings with all-MiniLM-L6-v2 (90 MB) in a temporary gateway on a free port. Each start is one
    HTTP request while no worker runs. Every answer is compared with the answer of plain transformers. A fresh process
    with the same handler is also timed. 100 starts take two minutes or more. Leaves nothing behind. Needs the extra
    `demo`.

    Example: uvx --from 'pilotflame[demo]' pilotflame demo --starts 200
    """
    model = minilm.model_folder()
    os.environ.update(minilm.OFFLINE)
    tell: Callable[[str], None] = (lambda _: None) if as_json else lambda line: display.echo(line, raw=True)
    tell("Starting a gateway. Plain transformers computes the expected answer.")
    with private_gateway() as url, Client(url) as client:
        with display.spinner("computing the expected answer with plain transformers"):
            expected = minilm.reference([minilm.TEXT])[0]
        found = _Demo(client, expected).measure(starts, str(model), tell)
    fresh_ms = median(_fresh_process_ms(expected) for _ in range(FRESH_PROCESSES))
    found |= {"fresh_process_ms": fresh_ms}
    p50 = found["cold_ms"]["p50"]
    tell(
        f"A fresh process with the same handler answers after {fresh_ms:,.0f} ms: {fresh_ms / p50:,.0f} times p50."
    )
    if as_json:
        display.print_json(found)


class _Demo:
    """The function that is deployed and called."""

    def __init__(self, client: Client, expected: list[float]) -> None:
        self._client, self._expected = client, expected

    def measure(self, starts: int, model: str, tell: Callable[[str], None]) -> dict[str, Any]:
        """Deploy the function, time its starts, and return the figures."""
        deployed_s = self._deploy(model)
        self._wait_for_rest()
        rest = _memory_at_rest()
        tell(f"Deployed sentence embeddings (all-MiniLM-L6-v2, 90 MB of weights) in {deployed_s:.1f} s.")
        tell(
            f"No worker runs. {rest['processes']} processes hold {rest['mb']:.0f} MB: the gateway, and the imports (torch).\n"
        )
        tell(f"{starts} requests, each while no worker runs:")
        cold, warm = self._time_starts(starts)
        typical = sorted(cold, key=lambda call: call.ms)[(len(cold) - 1) // 2]
        figures = {
            "starts": starts, "right_answers": len(cold), "cold_ms": percentiles([call.ms for call in cold]),
            "warm_ms": percentiles(warm), "phases_ms": dict(typical.phases_ms), "at_rest": rest,
        }  # fmt: skip
        for line in _lines_of(figures):
            tell(line)
        figures["worker_adds_kb"] = added_kb = self._added_kb()
        tell(
            f"\nA worker that has answered adds {added_kb:,} KB of memory: workers share the weights and the imports."
        )
        return figures

    def _deploy(self, model: str) -> float:
        settings = {"name": NAME, "snapshot": model, "scale.idle_timeout_s": IDLE_TIMEOUT_S}
        started_s = time.monotonic()
        with display.spinner("deploying: import, build, one start of a worker"):
            self._client.deploy(TEMPLATES / NAME, settings)
        return time.monotonic() - started_s

    def _time_starts(self, starts: int) -> tuple[list[TimedCall], list[float]]:
        """Return the cold calls, and the milliseconds of the warm calls that follow each cold call."""
        cold, warm = list[TimedCall](), list[float]()
        with display.progress("cold starts", in_bytes=False) as show:
            for number in range(starts):
                self._wait_for_rest()
                cold.append(call := self._call())
                if not call.cold:
                    raise GatewayError(
                        "A worker answered where none should run.", remedy="Run the demo again."
                    )
                warm += [self._call().ms for _ in range(WARM_CALLS)]
                show(number + 1, starts)
        return cold, warm

    def _call(self) -> TimedCall:
        started_s = time.perf_counter()
        with self._client.call(NAME, BODY) as reply:
            answer = reply.value()
        ms = (time.perf_counter() - started_s) * 1e3
        _check(answer, self._expected)
        return TimedCall(ms, reply.cold, reply.timing_ms)

    def _wait_for_rest(self) -> None:
        """Wait until no worker runs and the standby process for the next worker is ready."""
        self._wait_for_ends()
        for view in islice(self._client.views(), REST_S):
            for function in view["functions"]:
                workers = function["workers"]
                busy = workers["ready"] + workers["starting"] + workers["draining"]
                if not busy and function["standby"]:
                    return
        late = f"The function still has workers after {REST_S} s."
        raise GatewayError(late, remedy="Run the demo on a machine with less load.")

    def _wait_for_ends(self) -> None:
        """Wait until the processes of the workers have ended. The console would show that only in its next line, up to 1 s later."""
        rows = self._client.get("v1", "functions", NAME, memory=1)["processes"]
        workers = list[psutil.Process]()
        for pid in (row["pid"] for row in rows if row["role"] == "worker"):
            with contextlib.suppress(psutil.NoSuchProcess):
                workers.append(psutil.Process(pid))
        psutil.wait_procs(workers, REST_S)

    def _added_kb(self) -> int:
        """Return the KB of memory that only the newest of several workers holds, after all of them have answered."""
        self._client.warm(NAME, wait_s=REST_S, workers=MEASURED_WORKERS)
        served = set[str]()
        with ThreadPoolExecutor(2 * MEASURED_WORKERS) as pool:
            for _ in range(CALL_ROUNDS):
                served |= set(pool.map(self._worker_of_a_call, range(4 * MEASURED_WORKERS)))
                if len(served) >= MEASURED_WORKERS:
                    break
        processes = self._client.get("v1", "functions", NAME, memory=1)["processes"]
        workers = [process for process in processes if process["role"] == "worker"]
        newest = max(workers, key=lambda process: int(process["name"].rpartition("-")[2]))
        return round(float(newest["uss_mb"]) * 1000)

    def _worker_of_a_call(self, _number: int) -> str:
        with self._client.call(NAME, BODY) as reply:
            _check(reply.value(), self._expected)
        return reply.worker


def _check(answer: Any, expected: list[float]) -> None:
    """Raise GatewayError if an answer differs from the answer of plain transformers."""
    if (worst := minilm.difference(answer["embedding"], expected)) > minilm.TOLERANCE:
        raise GatewayError(
            f"An embedding differs from plain transformers by {worst:.1e}.", remedy="Report it, please."
        )


def _fresh_process_ms(expected: list[float]) -> float:
    with display.spinner("timing a fresh process"):
        answer, ms = first_answer(TEMPLATES / NAME, minilm.model_folder(), EVENT)
    _check(answer, expected)
    return ms


def _memory_at_rest() -> dict[str, float]:
    """Return the number of processes of the gateway, and their memory. A page that several of them map counts once."""
    processes = psutil.Process().children(recursive=True)
    return {
        "processes": len(processes),
        "mb": sum(process.memory_full_info().pss for process in processes) / 1e6,
    }


def percentiles(times_ms: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum. 99 % of the times are at most as long as the 99th percentile."""
    ordered = sorted(times_ms)
    return {"p50": median(ordered), "p99": ordered[ceil(0.99 * len(ordered)) - 1], "max": ordered[-1]}


def _lines_of(figures: Mapping[str, Any]) -> Iterator[str]:
    cold, warm = figures["cold_ms"], figures["warm_ms"]
    best = display.style(f"p50 {cold['p50']:.1f} ms, p99 {cold['p99']:.1f} ms", bold=True)
    yield f"  {best}, longest {cold['max']:.1f} ms, from the request to the whole answer"
    yield f"  all {figures['right_answers']} answers are those of plain transformers"
    yield f"  the same request to a worker that runs: p50 {warm['p50']:.1f} ms, p99 {warm['p99']:.1f} ms\n"
    phases = {name: ms for name, ms in figures["phases_ms"].items() if name != "total"}
    yield f"Where the {sum(phases.values()):.1f} ms of a median start went:"
    longest_ms = max(phases.values())
    for name, ms in phases.items():
        bar = "█" * round(ms / longest_ms * BAR_COLUMNS) or "▏"
        coloured = display.style(f"{bar:<{BAR_COLUMNS}}", fg="yellow")
        yield f"  {name:<9}{ms:>6.2f} ms  {coloured}  {MEANING.get(name, '')}"

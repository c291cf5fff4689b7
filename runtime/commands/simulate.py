"""The command that predicts how many workers a load needs, and what keeping them warm costs: `pilotflame simulate`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...errors import CodeError
from ..batching import simulator
from ..batching.simulator import CallOutcome, DurationModel, Run, SimulatedCall, SimulatedFunction, Simulator
from . import display, options
from .simulate_keep_alive import RememberedCalls, ReplayOrder, compare, replay_options, replayed
from .trace import read_trace

# The progress bar is updated once per this many calls.
PROGRESS_CALLS = 500
MAX_CALLS = 5_000_000
MAX_WORKERS = 1000
POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.argument("arrivals", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rate", type=POSITIVE, help="Calls a second at random times, instead of ARRIVALS.")
@click.option("--duration", "duration_s", type=POSITIVE, default=60.0, help="Seconds, with --rate.")
@click.option("--curve", metavar="SIZE:MS,...", help="Time of a batch, such as 1:20.5,32:36.")
@click.option(
    "--function",
    shell_complete=options.complete_functions,
    metavar="NAME",
    help="Take curve and limits of this function.",
)
@click.option("--noise", type=click.FloatRange(0, 1), default=0.05, help="Random share of a batch's time.")
@click.option("--deadline", "deadline_s", type=POSITIVE, help="Seconds a caller waits.  [default: no limit]")
@click.option("--workers", default="1", metavar="N,...", help="How many to try: 2, or 1,2,4, or 1-4.")
@click.option(
    "--limit", type=click.IntRange(1, 4096), help="max_size of @batch; 1 without it.  [default: 32]"
)
@click.option("--max-queue", type=click.IntRange(min=1), help="max_queue of the function.  [default: 1000]")
@click.option("--speed", type=POSITIVE, default=1.0, help="Play ARRIVALS so many times faster.")
@click.option("--seed", type=int, default=1, help="Seed of the random numbers.")
@replay_options
@options.gateway_address
@options.as_json
def simulate(
    *, arrivals: Path | None, rate: float | None, duration_s: float, curve: str | None, function: str | None,
    noise: float, deadline_s: float | None, workers: str, limit: int | None, max_queue: int | None, speed: float,
    seed: int, url: str, api_key: str, as_json: bool, order: ReplayOrder,
) -> None:  # fmt: skip
    """Predict how many calls are answered in time, or what keeping functions warm costs.

    ARRIVALS is a CSV file with a column `timestamp` (seconds, or ISO times), or .jsonl, plain or .gz; or give a --rate.
    Calls go through the gateway's own queue on a simulated clock. Nothing is deployed, and no handler runs. The
    time of a batch is what a gateway has learned of a --function, or a --curve.

    With --policy, calls are replayed through the gateway's own keep-alive policy, with all that it has to learn, and
    under others: what would each have cost, in holding and in waiting? A fixed:60 stays READY for 60 s and then goes
    down to the lowest rung.

    \b
    Examples: are two workers enough for three times last week's load, if callers wait for a second?
      pilotflame simulate calls.csv.gz --speed 3 --function embed --deadline 1 --workers 1-4
      pilotflame simulate calls.csv.gz --speed 3 --curve 1:20.5,32:36 --deadline 1 --workers 1-4
    What would the last two days of a function have cost, and what those of a trace with many functions?
      pilotflame simulate --policy all --from-log embed --since 2d
      pilotflame simulate calls.csv.gz --policy all --rung ready:1gpu+18:0 --rung parked:18:0.4 --rung local:16disk:12
    """
    if order.policies or order.logged:
        calls_of = RememberedCalls(url, api_key)
        functions = replayed(arrivals, order, function, speed, seed, calls_of)
        return compare(functions, order, as_json=as_json)
    if (curve is None) == (function is None):
        raise click.UsageError("Give either a --curve or a --function that a gateway has.")
    if (arrivals is None) == (rate is None):
        raise click.UsageError("Give either a file of ARRIVALS or a --rate.")
    timeout_s = deadline_s or math.inf
    if rate is not None:
        if rate * duration_s > MAX_CALLS:
            raise click.UsageError(f"--rate times --duration is more than {MAX_CALLS:,} calls.")
        calls = list(simulator.poisson(rate, round(rate * duration_s), timeout_s=timeout_s, seed=seed))
    elif arrivals is not None:
        times = enumerate(read_arrivals(arrivals, order))
        calls = [SimulatedCall(at_s / speed, timeout_s, body=b"%d" % number) for number, at_s in times]
    counts = read_counts(workers)
    if function is not None:
        learned = read_function(function, url, api_key, noise)
    else:
        learned = SimulatedFunction(DurationModel(read_curve(curve or ""), noise))
    learned = replace(
        learned, seed=seed, max_batch=limit or learned.max_batch, max_queue=max_queue or learned.max_queue
    )
    rows = list[dict[str, Any]]()
    with display.progress("simulating", in_bytes=False) as update:
        for count in counts:
            model = replace(learned, workers=count)
            report = partial(update, total=len(counts) * len(calls), note=display.counted(count, "worker"))
            run = Simulator(model).run(_tracked(calls, len(rows) * len(calls), report))
            rows.append({"workers": count, **figures(run)})
    if as_json:
        return display.print_json({"runs": rows})
    click.echo(f"{rows[0]['calls']} calls")
    columns = ("workers", "on time", "refused", "too late", "p50", "p99", "calls/s", "mean batch", "busy")
    return display.print_table(columns, [_row(row) for row in rows])


def _tracked(calls: list[SimulatedCall], done: int, report: Callable[[int], None]) -> Iterator[SimulatedCall]:
    for number, call in enumerate(calls):
        if number % PROGRESS_CALLS == 0:
            report(done + number)
        yield call


def figures(run: Run) -> dict[str, Any]:
    """Return a run's figures: the outcomes of first attempts, the latencies of calls answered in time."""
    first = [attempt for attempt in run.attempts if attempt.tries == 1]
    outcomes = Counter(attempt.outcome for attempt in first)
    answered = [attempt.latency_s for attempt in run.attempts if attempt.outcome is CallOutcome.ON_TIME]
    retry_after = [attempt.retry_after_s for attempt in run.attempts if attempt.retry_after_s is not None]
    span_s = run.span_s or 1.0
    return {
        "calls": len(first),
        **{outcome.value: outcomes[outcome] for outcome in CallOutcome},
        "on_time_share": outcomes[CallOutcome.ON_TIME] / len(first) if first else 1.0,
        "latency_p50_s": percentile(answered, 0.5),
        "latency_p99_s": percentile(answered, 0.99),
        "retry_after_p50_s": percentile(retry_after, 0.5),
        "batch_mean": sum(run.sizes) / len(run.sizes) if run.sizes else 0.0,
        "batch_p95": percentile(run.sizes, 0.95),
        "per_second": len(answered) / span_s,
        "busy_share": run.busy_s / (span_s * run.slots),
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    ascending = sorted(values)
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))] if ascending else None


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    times = (row["latency_p50_s"], row["latency_p99_s"])
    p50, p99 = (display.milliseconds(None if time_s is None else time_s * 1e3) for time_s in times)
    refused, late = row["refused"] + row["dropped"] + row["full"], row["late"] + row["expired"]
    return (
        str(row["workers"]), f"{row['on_time_share']:.1%}", str(refused), str(late), p50, p99,
        f"{row['per_second']:.1f}", f"{row['batch_mean']:.1f}", f"{row['busy_share']:.0%}",
    )  # fmt: skip


# -- reading the command's arguments


def read_arrivals(path: Path, order: ReplayOrder) -> list[float]:
    """Return the ascending times of all calls in a trace. Raise what `read_trace` raises."""
    trace = read_trace(path, time_column=order.time_column, function_column=order.function_column)
    return sorted(itertools.chain.from_iterable(trace.values()))


def read_curve(text: str) -> tuple[tuple[float, float], ...]:
    """Return the points (batch size, seconds) of a curve such as "1:20.5,32:36".

    Here a batch of 1 takes 20.5 ms, and a batch of 32 takes 36 ms. Raise CodeError if it is malformed.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        points = tuple(sorted((float(size), float(ms) / 1e3) for size, ms in pairs))
    except ValueError:
        points = ()
    valid = all(0 < number < math.inf for point in points for number in point)
    if not valid or not points or len(dict(points)) < len(points):
        remedy = "Write sizes and milliseconds such as 1:20.5,32:36, each size once."
        raise CodeError(f"{text!r} is not a curve.", remedy=remedy)
    return points


def read_function(name: str, url: str, api_key: str, noise: float) -> SimulatedFunction:
    """Return a gateway's function with what it has learned of it. Raise CodeError if that is nothing."""
    # httpx takes 50 ms to import, and without --function nobody needs it.
    from .client import Client  # noqa: PLC0415

    with Client(url, api_key=api_key) as client:
        status = client.get("v1", "functions", name)
    points = tuple((size, seconds) for size, seconds in status["latency_curve"] if size > 0 and seconds > 0)
    if not points:
        remedy = "Call it a few times, or give a --curve."
        raise CodeError(f"The gateway has not learned yet how long {name!r} takes.", remedy=remedy)
    settings = status["settings"]
    return SimulatedFunction(
        DurationModel(points, noise), max_batch=status["batch"] or 1, slots=settings["concurrency"],
        max_queue=settings["max_queue"],
    )  # fmt: skip


def read_counts(text: str) -> list[int]:
    """Return the numbers in a text such as "1,2,4" or "1-4". Raise CodeError if the text is malformed."""
    counts: list[int] = []
    with suppress(ValueError):
        ranges = [part.partition("-") for part in text.split(",")]
        counts = [count for first, _, last in ranges for count in range(int(first), int(last or first) + 1)]
    if not counts or min(counts) < 1 or max(counts) > MAX_WORKERS:
        remedy = f"Write 2, or 1,2,4, or 1-4; at most {MAX_WORKERS}."
        raise CodeError(f"{text!r} is not a list of numbers of workers.", remedy=remedy)
    return counts

"""The command that tells how many workers some load needs: `pilotflame simulate`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from ..batching.figures import figures
from ..batching.simulator import DurationModel, SimulatedCall, SimulatedFunction, Simulator, poisson
from . import display, options, trace

# The bar moves each time that so many calls have come.
TOLD_EVERY = 500
MOST_CALLS = 5_000_000


@click.command()
@click.argument("arrivals", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    help="Calls a second, at random, instead of ARRIVALS.",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="For how many seconds, with --rate.",
)
@click.option(
    "--curve", required=True, metavar="SIZE:MS,...", help="How long a batch takes, as 1:20.5,32:36."
)
@click.option(
    "--noise",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="By how much batches of a size differ, as a share.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that callers wait.  [default: for ever]",
)
@click.option(
    "--workers",
    default="1",
    show_default=True,
    metavar="N,...",
    help="How many workers: 2, or 1,2,4, or 1-4: a line each.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="max_size of @batch; 1 without it.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="max_queue in pilotflame.toml.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="ARRIVALS come so many times as fast as they were recorded.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Another gives another run.")
@options.as_json
def simulate(
    *, arrivals: Path | None, rate: float | None, duration_s: float, curve: str, noise: float,
    deadline_s: float | None, workers: str, limit: int, max_queue: int, speed: float, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Tell what calls would meet: how many are answered in time, and how many workers that takes.

    ARRIVALS is a CSV file with a column `timestamp` (seconds, or ISO times), plain or .gz; or give a --rate. The calls
    go through the very queue of the gateway, with workers that only take time; nothing is deployed, nothing waits.

    \b
    Example: would two workers do at three times last week's load, where callers wait for a second?
      pilotflame simulate calls.csv.gz --speed 3 --curve 1:20.5,32:36 --deadline 1 --workers 1-4
    """
    if (arrivals is None) == (rate is None):
        raise click.UsageError("Give either a file of ARRIVALS or a --rate.")
    timeout_s = deadline_s or math.inf
    if rate is not None and rate * duration_s > MOST_CALLS:
        raise click.UsageError(
            f"--rate {rate:g} for --duration {duration_s:g} are more than {MOST_CALLS:,} calls."
        )
    if arrivals is not None:
        calls = [SimulatedCall(at_s / speed, timeout_s, body=b"%d" % number)
                 for number, at_s in enumerate(trace.read_arrivals(arrivals))]  # fmt: skip
    else:
        calls = list(poisson(rate or 1.0, round((rate or 1.0) * duration_s), timeout_s=timeout_s, seed=seed))
    timed, counts = DurationModel(trace.read_curve(curve), noise), trace.read_counts(workers)
    rows = []
    with display.tally("simulating") as progress:
        for number, count in enumerate(counts):
            plant = SimulatedFunction(timed, max_batch=limit, workers=count, max_queue=max_queue, seed=seed)

            def told(done: int, number: int = number, count: int = count) -> None:
                said = "1 worker" if count == 1 else f"{count} workers"
                progress(number * len(calls) + done, len(counts) * len(calls), said)

            rows.append({"workers": count, **figures(Simulator(plant).run(_counted(calls, told)))})
    if as_json:
        return display.print_json({"runs": rows})
    return _print(rows)


def _counted(calls: list[SimulatedCall], told: Any) -> Iterator[SimulatedCall]:
    for number, call in enumerate(calls):
        if number % TOLD_EVERY == 0:
            told(number)
        yield call


def _print(rows: list[dict[str, Any]]) -> None:
    click.echo(f"{rows[0]['calls']} calls")
    columns = ("workers", "on time", "refused", "too late", "p50", "p99", "calls/s", "mean batch", "busy")
    display.print_table(columns, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    def ms(name: str) -> str:
        return "-" if row[name] is None else display.milliseconds(row[name] * 1e3)

    return (
        str(row["workers"]), f"{row['on_time_share']:.1%}", str(row["refused"] + row["dropped"] + row["full"]),
        str(row["late"] + row["expired"]), ms("latency_p50_s"), ms("latency_p99_s"), f"{row['per_second']:.1f}",
        f"{row['batch_mean']:.1f}", f"{row['busy_share']:.0%}",
    )  # fmt: skip


COMMANDS = (simulate,)

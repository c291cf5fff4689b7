"""The command that predicts the workers that a load needs, and the cost of keeping them warm: `pilotflame simulate`.

It runs calls through the gateway's own queue, or with --policy through its keep-alive policy.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ....errors import CodeError
from ...calls.batching import simulator
from ...calls.batching.simulator import (
    CallOutcome,
    DurationModel,
    Run,
    SimulatedCall,
    SimulatedFunction,
    Simulator,
)
from ...command.client import display, options
from ...command.client.trace import FUNCTION_COLUMN, TIME_COLUMN, read_trace, split
from ...ground.billing.usage import DISK_SHARE, GB, HOUR_S
from ...node.scaling.idle_distribution import SharedPrior
from ...node.scaling.idle_period import QUIET_S
from ...node.scaling.ladder import Ladder, Rung
from ...node.scaling.ladder_simulator import (
    FELT_S,
    Fixed,
    KeepAlivePolicy,
    LadderRun,
    Learned,
    Replay,
    run_together,
    timeout,
)

if TYPE_CHECKING:
    from ...ground.settings.gateway_settings import GatewaySettings

MAX_CALLS = 5_000_000
MAX_LOGGED_CALLS = 1_000_000
MAX_WORKERS = 1000
POSITIVE, PRICE = click.FloatRange(min=0, min_open=True), click.FloatRange(min=0)
# The rungs that are used without --rung and without measurements of a gateway. They were measured with MiniLM on CPUs.
# Each has a name, the GB of memory or of disk that it uses, and the seconds to wake.
USUAL_RUNGS = ("ready:0.45:0", "zygote:0.1:0.03", "local:0.1disk:5.8")
SERVICE_S = 0.2
POLICIES = ("policy", "fixed:5", "fixed:60", "fixed:600", "always-on")
# An earlier version of this command had this policy. Now only `make bench-policy` has it.
BENCHMARKED = "optimum"
SLOW_TITLE = f"over {FELT_S * 1e3:.0f} ms"
WAITS = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True)
class SimulateOptions:
    """The argument and the options of the command."""

    arrivals: Path | None
    rate: float | None
    duration_s: float
    curve: str | None
    function: str | None
    noise: float
    deadline_s: float | None
    workers: str
    limit: int | None
    max_queue: int | None
    speed: float
    seed: int
    policies: tuple[str, ...]
    logged: tuple[str, ...]
    since: float | None
    rungs: tuple[str, ...]
    split: int | None
    service_ms: float | None
    time_column: str
    function_column: str
    price_memory: float | None
    price_device: float | None
    price_waiting: float | None
    url: str
    api_key: str
    as_json: bool

    def trace(self, file: Path) -> dict[str, list[float]]:
        """Return the ascending times of each function's calls in a file. Raise CodeError if the file cannot be used."""
        return read_trace(file, time_column=self.time_column, function_column=self.function_column)

    def ask(self, name: str, *path: str, **query: Any) -> dict[str, Any]:
        """Return the gateway's answer about a function."""
        # The import of httpx takes 50 ms, and most simulations ask no gateway.
        from ...command.client.client import Client  # noqa: PLC0415

        with Client(self.url, api_key=self.api_key) as client:
            found: dict[str, Any] = client.get("v1", "functions", name, *path, **query)
        return found

    def calls_of(self, name: str) -> dict[str, Any]:
        """Return the calls of a function that the gateway has recorded, and the ladder that it has measured."""
        query = {} if self.since is None else {"since": self.since}
        return self.ask(name, "arrivals", lines=MAX_LOGGED_CALLS, **query)

    def prices(self, gateway: Mapping[str, float]) -> GatewaySettings:
        """Return settings with the prices. A price comes from an option, else from the `gateway`, else from a variable."""

        def price(option: float | None, name: str) -> float | None:
            return gateway.get(name) if option is None else option

        return options.gateway_settings(
            price_memory_gb_hour=price(self.price_memory, "memory_gb_hour"),
            price_device_hour=price(self.price_device, "device_hour"),
            price_waiting_s=price(self.price_waiting, "waiting_s"),
        )  # fmt: skip


@click.command()
@click.argument("arrivals", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--rate", type=POSITIVE, help="Calls a second at random times, instead of ARRIVALS.")
@click.option("--duration", "duration_s", type=POSITIVE, default=60.0, help="Seconds, with --rate.")
@click.option("--curve", metavar="SIZE:MS,...", help="Time of a batch, such as 1:20.5,32:36.")
@click.option("--function", metavar="NAME", shell_complete=options.complete_functions, help="Take curve and limits of this function.")  # fmt: skip
@click.option("--noise", type=click.FloatRange(0, 1), default=0.05, help="Random share of a batch's time.")
@click.option("--deadline", "deadline_s", type=POSITIVE, help="Seconds a caller waits.  [default: no limit]")
@click.option("--workers", default="1", metavar="N,...", help="How many to try: 2, or 1,2,4, or 1-4.")
@click.option("--limit", type=click.IntRange(1, 4096), help="max_size of @batch; 1 without it.  [default: 32]")  # fmt: skip
@click.option("--max-queue", type=click.IntRange(min=1), help="max_queue of the function.  [default: 1000]")
@click.option("--speed", type=POSITIVE, default=1.0, help="Factor by which ARRIVALS are sped up.")
@click.option("--seed", type=int, default=1, help="Seed of the random numbers.")
@click.option(
    "--policy", "policies", metavar="NAME", multiple=True,
    help=f"Replay keep-alive instead, under this policy. Repeatable: all, or {', '.join(POLICIES)}.",
)  # fmt: skip
@click.option(
    "--from-log", "logged", metavar="FUNCTION", multiple=True, shell_complete=options.complete_functions,
    help="With --policy: replay the calls that the gateway remembers of this function. Repeatable.",
)  # fmt: skip
@click.option("--since", type=options.Moment(), help="With --from-log: only calls from then on, as 2d.  [default: all]")  # fmt: skip
@click.option(
    "--rung", "rungs", metavar="NAME:HOLD:WAKE_S", multiple=True,
    help="With --policy: a rung of the ladder, READY first. HOLD in GB of memory, or as 16disk, 1gpu+18."
    f"  [default: as measured, else {' '.join(USUAL_RUNGS)}]",
)  # fmt: skip
@click.option(
    "--split", type=click.IntRange(1, 10_000), metavar="N",
    help="With --policy: deal the calls of ARRIVALS to N functions at random, by Zipf's law.",
)  # fmt: skip
@click.option("--service", "service_ms", type=POSITIVE, metavar="MS", help="How long a call takes.  [default: as measured, else 200]")  # fmt: skip
@click.option("--time-column", default=TIME_COLUMN, metavar="NAME", help="The column or field with the time of a call.")  # fmt: skip
@click.option("--function-column", default=FUNCTION_COLUMN, metavar="NAME", help="The column or field with the function's name.")  # fmt: skip
@click.option("--price-memory", type=PRICE, help="Money for a GB of memory for an hour.  [default: the gateway's, else PILOTFLAME_PRICE_*]")  # fmt: skip
@click.option("--price-device", type=PRICE, help="Money for a whole GPU for an hour.")
@click.option("--price-waiting", type=PRICE, help="What a second of one caller's waiting is worth.")
@options.gateway_address
@options.as_json
def simulate(**values: Any) -> None:
    """Predict how many calls are answered in time, or what keeping functions warm costs.

    ARRIVALS is a CSV file with a column `timestamp` (seconds, or ISO times), or .jsonl, plain or .gz; or give a --rate.
    Calls go through the gateway's own queue on a simulated clock. Nothing is deployed, and no handler runs. The
    time of a batch comes from --curve, or from a gateway's measurements of --function.

    With --policy, calls are replayed through the gateway's own keep-alive policy, which learns from the calls as they
    come, and through other policies. The result is each policy's cost of holding and of waiting. The policy fixed:60
    keeps a worker READY for 60 s and then moves it to the lowest rung.

    \b
    Example: are two workers enough for three times last week's load, if callers wait for a second?
      pilotflame simulate calls.csv.gz --speed 3 --function embed --deadline 1 --workers 1-4
      pilotflame simulate calls.csv.gz --speed 3 --curve 1:20.5,32:36 --deadline 1 --workers 1-4
    Example: what is the cost of the last two days of a function, and of a trace with many functions?
      pilotflame simulate --policy all --from-log embed --since 2d
      pilotflame simulate calls.csv.gz --policy all --rung ready:1gpu+18:0 --rung parked:18:0.4 --rung local:16disk:12
    """
    given = SimulateOptions(**values)
    if given.policies or given.logged:
        _compare_policies(given)
    else:
        _try_workers(given)


# -- how many calls are answered in time


def _try_workers(given: SimulateOptions) -> None:
    """Print how each number of workers serves the calls."""
    if (given.curve is None) == (given.function is None):
        raise click.UsageError("Give either a --curve or a --function that a gateway has.")
    calls, counts, learned = _calls(given), read_counts(given.workers), _simulated_function(given)
    rows = list[dict[str, Any]]()
    with display.progress("simulating", in_bytes=False) as update:
        for count in counts:
            update(len(rows), len(counts), display.counted(count, "worker"))
            rows.append({"workers": count, **figures(Simulator(replace(learned, workers=count)).run(calls))})
    if given.as_json:
        return display.print_json({"runs": rows})
    display.echo(f"{rows[0]['calls']} calls")
    columns = ("workers", "on time", "refused", "too late", "p50", "p99", "calls/s", "mean batch", "busy")
    return display.print_table(columns, [_workers_row(row) for row in rows])


def _calls(given: SimulateOptions) -> list[SimulatedCall]:
    if (given.arrivals is None) == (given.rate is None):
        raise click.UsageError("Give either a file of ARRIVALS or a --rate.")
    timeout_s = given.deadline_s or math.inf
    if given.arrivals is not None:
        times = sorted(itertools.chain.from_iterable(given.trace(given.arrivals).values()))
        return [
            SimulatedCall(at_s / given.speed, timeout_s, body=b"%d" % number)
            for number, at_s in enumerate(times)
        ]
    rate = given.rate or 0.0
    if rate * given.duration_s > MAX_CALLS:
        raise click.UsageError(f"--rate times --duration is more than {MAX_CALLS:,} calls.")
    return list(simulator.poisson(rate, round(rate * given.duration_s), timeout_s=timeout_s, seed=given.seed))


def _simulated_function(given: SimulateOptions) -> SimulatedFunction:
    """Return a function with --curve, or else a gateway's function with its learned curve. Raise CodeError if there is no
    curve.
    """
    if given.function is None:
        found = SimulatedFunction(DurationModel(read_curve(given.curve or ""), given.noise))
    else:
        status = given.ask(given.function)
        points = tuple(
            (size, seconds) for size, seconds in status["latency_curve"] if size > 0 and seconds > 0
        )
        if not points:
            wrong = f"The gateway has not learned yet how long {given.function!r} takes."
            raise CodeError(wrong, remedy="Call it a few times, or give a --curve.")
        settings = status["settings"]
        found = SimulatedFunction(
            DurationModel(points, given.noise), max_batch=status["batch"] or 1, slots=settings["concurrency"],
            max_queue=settings["max_queue"],
        )  # fmt: skip
    max_batch, max_queue = given.limit or found.max_batch, given.max_queue or found.max_queue
    return replace(found, seed=given.seed, max_batch=max_batch, max_queue=max_queue)


def figures(run: Run) -> dict[str, Any]:
    """Return a run's figures. Only first attempts count in outcomes, and only calls answered in time in latencies."""
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


def _workers_row(row: dict[str, Any]) -> tuple[str, ...]:
    times = (row["latency_p50_s"], row["latency_p99_s"])
    p50, p99 = (display.milliseconds(None if time_s is None else time_s * 1e3) for time_s in times)
    refused, late = row["refused"] + row["dropped"] + row["full"], row["late"] + row["expired"]
    return (
        str(row["workers"]), f"{row['on_time_share']:.1%}", str(refused), str(late), p50, p99,
        f"{row['per_second']:.1f}", f"{row['batch_mean']:.1f}", f"{row['busy_share']:.0%}",
    )  # fmt: skip


def read_curve(text: str) -> tuple[tuple[float, float], ...]:
    """Return the points (batch size, seconds) of a curve such as "1:20.5,32:36".

    In this example, a batch of 1 takes 20.5 ms, and a batch of 32 takes 36 ms. Raise CodeError if `text` is malformed.
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


# -- what keeping functions warm costs


class ReplayedFunction(NamedTuple):
    """A function with the times of its calls, the duration of a call, and its ladder with the names of the rungs."""

    arrivals: Sequence[float]
    service_s: float
    ladder: Ladder
    rungs: tuple[str, ...]


def _compare_policies(given: SimulateOptions) -> None:
    """Print what each policy costs."""
    functions = _replayed(given)
    policies = [name for one in given.policies or ("all",) for name in (POLICIES if one == "all" else (one,))]
    named = list(dict.fromkeys(policies))
    rows = list[dict[str, Any]]()
    with display.progress("replaying", in_bytes=False) as update:
        for name in named:
            update(len(rows), len(named), name)
            rows.append(replay(functions, name))
    calls = sum(len(one.arrivals) for one in functions)
    span_s = max(one.arrivals[-1] - one.arrivals[0] for one in functions)
    if given.as_json:
        return display.print_json(
            {"functions": len(functions), "calls": calls, "span_s": span_s, "policies": rows}
        )
    counts = f"{display.counted(len(functions), 'function')}, {display.counted(calls, 'call')}"
    display.echo(f"{counts} in {display.duration(span_s)}")
    rungs = list(dict.fromkeys(rung for row in rows for rung in row["rung_s"]))
    columns = ("", "bill", "holding", "waiting", "cold starts", SLOW_TITLE, *WAITS, *rungs)
    return display.print_table(columns, [_policy_row(row, rungs) for row in rows])


def _policy_row(row: dict[str, Any], rungs: Sequence[str]) -> tuple[str, ...]:
    return (
        row["policy"], _money(row["bill"]), _money(row["holding"]), f"{row['waiting_s']:.1f} s",
        str(row["cold_starts"]), str(row["slow_calls"]),
        *(display.milliseconds(row[f"wait_{name}_s"] * 1e3) for name in WAITS),
        *(display.duration(row["rung_s"].get(rung, 0.0)) for rung in rungs),
    )  # fmt: skip


def _replayed(given: SimulateOptions) -> list[ReplayedFunction]:
    """Return the functions to replay. They come from a trace, or from calls that the gateway remembers."""
    if (given.arrivals is None) == (not given.logged):
        raise click.UsageError("With --policy, give either a file of ARRIVALS or --from-log FUNCTION.")
    if given.arrivals is not None:
        trace = given.trace(given.arrivals)
        if given.split is not None:
            trace = split(sorted(itertools.chain.from_iterable(trace.values())), given.split, given.seed)
        measured = given.calls_of(given.function) if given.function is not None else {}
        return [_replayed_function(given, times, measured) for times in trace.values()]
    logs = {name: given.calls_of(name) for name in given.logged}
    for name, log in logs.items():
        if not log["arrivals"]:
            remedy = "Call it, or give an earlier --since."
            raise CodeError(f"The gateway remembers no call of {name!r}.", remedy=remedy)
    first_s = min(log["arrivals"][0] for log in logs.values())
    return [
        _replayed_function(given, [at_s - first_s for at_s in log["arrivals"]], log) for log in logs.values()
    ]


def _replayed_function(
    given: SimulateOptions, times: Sequence[float], measured: dict[str, Any]
) -> ReplayedFunction:
    """Return a function. Its figures come from the options, or else from a gateway's measurements."""
    prices = given.prices(measured.get("prices", {}))
    given_s = given.service_ms / 1e3 if given.service_ms is not None else None
    if not given.rungs and (rows := measured.get("rungs")):
        memory, device = prices.price_memory_gb_hour / HOUR_S / GB, prices.price_device_hour / HOUR_S
        held = [Rung(row["held_bytes"] * memory + row["devices"] * device, row["wake_s"]) for row in rows]
        named = [(row["rung"], rung) for row, rung in zip(rows, held, strict=True)]
    else:
        named = [_read_rung(text, prices) for text in given.rungs or USUAL_RUNGS]
    return ReplayedFunction(
        [at_s / given.speed for at_s in times], given_s or measured.get("service_s") or SERVICE_S,
        _ladder([rung for _, rung in named], prices.price_waiting_s), tuple(name for name, _ in named),
    )  # fmt: skip


def _read_rung(text: str, prices: GatewaySettings) -> tuple[str, Rung]:
    """Return the name and the rung of a text such as "zygote:0.1:0.03". Raise CodeError if the text is malformed."""
    try:
        name, hold, wake = text.split(":")
        return name, Rung(sum(_price(term, prices) for term in hold.split("+")), float(wake))
    except ValueError:
        remedy = "Write NAME:HOLD:WAKE_S, as zygote:0.1:0.03; HOLD in GB, as 0.1, 16disk, or 1gpu+18."
        raise CodeError(f"{text!r} is no rung.", remedy=remedy) from None


def _price(term: str, prices: GatewaySettings) -> float:
    """Return the cost of holding a term of HOLD, such as "16disk", for a second. Raise ValueError if it is malformed."""
    memory = prices.price_memory_gb_hour
    for unit, per_hour in (("disk", memory * DISK_SHARE), ("gpu", prices.price_device_hour), ("", memory)):
        if term.endswith(unit):
            return float(term.removesuffix(unit)) * per_hour / HOUR_S
    raise ValueError(term)


def _ladder(rungs: Sequence[Rung], waiting_s: float) -> Ladder:
    """Return a ladder. Raise CodeError if the rungs do not descend from READY."""
    if len(rungs) > 1 and all(0 <= number < math.inf for rung in rungs for number in rung):
        with suppress(ValueError):
            return Ladder(tuple(rungs), waiting_s)
    remedy = "Give READY first, with 0 s, then two or more rungs in the order of their seconds to wake."
    raise CodeError("The rungs are no ladder.", remedy=remedy)


def replay(functions: Sequence[ReplayedFunction], policy: str) -> dict[str, Any]:
    """Return the total figures of all functions under a policy, for example "fixed:60:zygote". Raise CodeError if there
    is no such policy or rung.
    """
    title, choose = _policy(policy)
    # In a gateway, an idle period begins only QUIET_S after the last call. So the policy keeps a worker QUIET_S longer.
    quiet_s = QUIET_S if policy == "policy" else 0.0
    replays = [Replay(one.arrivals, one.service_s, one.ladder, choose(one), quiet_s) for one in functions]
    whole, rung_s, bill = LadderRun(), defaultdict[str, float](float), 0.0
    for one, run in zip(functions, run_together(replays), strict=True):
        # Add the cost of READY while calls run, because `run.held` counts only idle periods and wakes.
        run.held += run.busy_s * one.ladder.rungs[0].hold_per_s
        bill += run.bill(one.ladder.wait_per_s)
        for rung, held_s in zip(one.rungs, run.rung_s, strict=True):
            rung_s[rung] += held_s
        rung_s[one.rungs[0]] += run.busy_s
        whole += run
    waits_s = [*([0.0] * (whole.requests - len(whole.waits))), *whole.waits]
    return {
        "policy": title, "bill": bill, "holding": whole.held, "waiting_s": whole.waited_s,
        "cold_starts": whole.woken, "slow_calls": whole.felt,
        **{f"wait_{name}_s": percentile(waits_s, share) for name, share in WAITS.items()},
        "rung_s": dict(rung_s),
    }  # fmt: skip


def _policy(policy: str) -> tuple[str, Callable[[ReplayedFunction], KeepAlivePolicy]]:
    """Return a policy's title, and a callable that makes the policy for a function. Raise CodeError for an unknown
    policy.
    """
    kind, _, rest = policy.partition(":")
    if policy == "policy":
        shared = SharedPrior()
        return "the policy", lambda one: Learned(one.ladder, shared)
    if policy == "always-on":
        return "always on", lambda one: Fixed(timeout(math.inf, 0))
    if kind == "fixed":
        after, _, rung = rest.partition(":")
        after_s = _seconds(policy, after)
        title = f"fixed {after_s:g} s{f' to {rung}' if rung else ''}"
        return title, lambda one: Fixed(timeout(after_s, _floor(one, rung)))
    remedy = f"Give all, or of: {', '.join(POLICIES)}."
    if kind == BENCHMARKED:
        remedy += f" `make bench-policy` in the source tree compares with {kind}."
    raise CodeError(f"There is no policy {policy!r}.", remedy=remedy)


def _seconds(policy: str, text: str) -> float:
    with suppress(ValueError):
        if 0 <= (after_s := float(text)) < math.inf:
            return after_s
    remedy = "Write seconds, as fixed:60, or fixed:60:zygote."
    raise CodeError(f"{policy!r} has no timeout.", remedy=remedy)


def _floor(one: ReplayedFunction, rung: str) -> int:
    """Return the index of a rung, or of the lowest rung if `rung` is empty. Raise CodeError if there is no such rung."""
    if not rung:
        return len(one.rungs) - 1
    if rung not in one.rungs:
        raise CodeError(f"The ladder has no rung {rung!r}.", remedy=f"It has {', '.join(one.rungs)}.")
    return one.rungs.index(rung)


def _money(amount: float) -> str:
    """Return an amount with three significant digits if it is below 1, else with two decimals, without an exponent."""
    digits = 2 - math.floor(math.log10(amount)) if 0 < amount < 1 else 2
    return f"{amount:.{digits}f}"

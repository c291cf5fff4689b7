"""Replays calls under keep-alive policies and compares what each costs: `pilotflame simulate --policy`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ...errors import CodeError
from ..scaling.ladder import Ladder, Rung
from ..telemetry.usage import GB, HOUR_S
from . import display, options
from .keep_alive_replay import (
    POLICIES,
    SERVICE_S,
    SLOW_TITLE,
    USUAL_RUNGS,
    PolicyOutcome,
    ReplayedFunction,
    make_ladder,
    read_ladder,
    replay,
)
from .trace import FUNCTION_COLUMN, TIME_COLUMN, read_trace, split

if TYPE_CHECKING:
    from ..settings.gateway_settings import GatewaySettings

F = TypeVar("F", bound=Callable[..., Any])
MAX_LOGGED = 1_000_000

POSITIVE = click.FloatRange(min=0, min_open=True)
PRICE = click.FloatRange(min=0)


class ReplayOrder(NamedTuple):
    """The options that are about keep-alive policies, and about the columns of a trace."""

    policies: tuple[str, ...] = ()
    logged: tuple[str, ...] = ()
    since: float | None = None
    rungs: tuple[str, ...] = ()
    service_ms: float | None = None
    split: int | None = None
    time_column: str = TIME_COLUMN
    function_column: str = FUNCTION_COLUMN
    price_memory: float | None = None
    price_disk: float | None = None
    price_device: float | None = None
    price_waiting: float | None = None

    def prices(self, known: Mapping[str, float]) -> GatewaySettings:
        """Return settings with the prices: the options, else what a gateway uses (`known`), else variables and defaults."""

        def price(option: float | None, name: str) -> float | None:
            return known.get(name) if option is None else option

        return options.gateway_settings(
            price_memory_gb_hour=price(self.price_memory, "memory_gb_hour"), price_disk_gb_hour=self.price_disk,
            price_device_hour=price(self.price_device, "device_hour"),
            price_waiting_s=price(self.price_waiting, "waiting_s"),
        )  # fmt: skip


_REPLAY_OPTIONS = (
    click.option(
        "--policy", "policies", metavar="NAME", multiple=True,
        help=f"Replay keep-alive instead, under this policy. Repeatable: all, or {', '.join(POLICIES)}, envelope.",
    ),
    click.option(
        "--from-log", "logged", metavar="FUNCTION", multiple=True, shell_complete=options.complete_functions,
        help="With --policy: replay the calls that the gateway remembers of this function. Repeatable.",
    ),
    click.option("--since", type=options.Moment(), help="With --from-log: only calls from then on, as 2d.  [default: all]"),
    click.option(
        "--rung", "rungs", metavar="NAME:HOLD:WAKE_S", multiple=True,
        help="With --policy: a rung of the ladder, READY first. HOLD in GB of memory, or as 16disk, 1gpu+18."
        f"  [default: as measured, else {' '.join(USUAL_RUNGS)}]",
    ),
    click.option(
        "--split", type=click.IntRange(1, 10_000), metavar="N",
        help="With --policy: deal the calls of ARRIVALS to N functions at random, by Zipf's law.",
    ),
    click.option("--service", "service_ms", type=POSITIVE, metavar="MS", help="How long a call takes.  [default: as measured, else 200]"),
    options.removed("--plot", "--json has the figures of each policy."),
    click.option("--time-column", default=TIME_COLUMN, metavar="NAME", help="The column or field with the time of a call."),
    click.option("--function-column", default=FUNCTION_COLUMN, metavar="NAME", help="The one with the function's name."),
    click.option("--price-memory", type=PRICE, help="Money for a GB of memory for an hour.  [default: the gateway's, else PILOTFLAME_PRICE_*]"),
    click.option("--price-disk", type=PRICE, help="Money for a GB of disk for an hour."),
    click.option("--price-device", type=PRICE, help="Money for a whole GPU for an hour."),
    click.option("--price-waiting", type=PRICE, help="What a second of one caller's waiting is worth."),
)  # fmt: skip


def replay_options(command: F) -> F:
    """Add the options of `ReplayOrder`, and pass them as `order`."""

    @functools.wraps(command)
    def ordered(**values: Any) -> Any:
        order = ReplayOrder(**{field: values.pop(field) for field in ReplayOrder._fields})
        return command(order=order, **values)

    found: Any = ordered
    for option in reversed(_REPLAY_OPTIONS):
        found = option(found)
    return found  # type: ignore[no-any-return]


class RememberedCalls(NamedTuple):
    """Where the calls of functions are remembered."""

    url: str
    api_key: str

    def of(self, name: str, since: float | None = None) -> dict[str, Any]:
        """Return what the gateway remembers of the calls of a function, and the ladder that it has measured."""
        # httpx takes 50 ms to import, and with a trace alone nobody needs it.
        from .client import Client  # noqa: PLC0415

        query = {} if since is None else {"since": since}
        with Client(self.url, api_key=self.api_key) as client:
            return client.get("v1", "functions", name, "arrivals", lines=MAX_LOGGED, **query)


def replayed(
    arrivals: Path | None, order: ReplayOrder, function: str | None, speed: float, seed: int, calls: RememberedCalls
) -> list[ReplayedFunction]:  # fmt: skip
    """Return the functions to replay: those of a trace, or those whose calls the gateway remembers."""
    if (arrivals is None) == (not order.logged):
        raise click.UsageError("With --policy, give either a file of ARRIVALS or --from-log FUNCTION.")
    if arrivals is None:
        return _logged(order, speed, calls)
    trace = read_trace(arrivals, time_column=order.time_column, function_column=order.function_column)
    if order.split is not None:
        trace = split(sorted(itertools.chain.from_iterable(trace.values())), order.split, seed)
    measured = calls.of(function) if function is not None else {}
    return [_function([at_s / speed for at_s in times], measured, order) for times in trace.values()]


def _logged(order: ReplayOrder, speed: float, calls: RememberedCalls) -> list[ReplayedFunction]:
    found = {name: calls.of(name, order.since) for name in order.logged}
    for name, measured in found.items():
        if not measured["arrivals"]:
            remedy = "Call it, or give an earlier --since."
            raise CodeError(f"The gateway remembers no call of {name!r}.", remedy=remedy)
    first_s = min(measured["arrivals"][0] for measured in found.values())
    return [
        _function([(at_s - first_s) / speed for at_s in measured["arrivals"]], measured, order)
        for measured in found.values()
    ]


def _function(arrivals: list[float], measured: dict[str, Any], order: ReplayOrder) -> ReplayedFunction:
    """Return a function with the figures of the options, else with those that a gateway has measured."""
    prices = order.prices(measured.get("prices", {}))
    given_s = order.service_ms / 1e3 if order.service_ms is not None else None
    service_s = given_s or measured.get("service_s") or SERVICE_S
    if not order.rungs and (rows := measured.get("rungs")):
        return ReplayedFunction(arrivals, service_s, *_measured_ladder(rows, prices))
    return ReplayedFunction(arrivals, service_s, *read_ladder(order.rungs or USUAL_RUNGS, prices))


def _measured_ladder(
    rows: Sequence[dict[str, Any]], prices: GatewaySettings
) -> tuple[Ladder, tuple[str, ...]]:
    """Return the ladder of the rungs as a gateway has measured them."""
    memory, device = prices.price_memory_gb_hour / HOUR_S / GB, prices.price_device_hour / HOUR_S
    rungs = [Rung(row["held_bytes"] * memory + row["devices"] * device, row["wake_s"]) for row in rows]
    return make_ladder(rungs, prices.price_waiting_s), tuple(row["rung"] for row in rows)


def compare(functions: list[ReplayedFunction], order: ReplayOrder, *, as_json: bool) -> None:
    """Print what each policy costs."""
    named = list(dict.fromkeys(name for policy in order.policies or ("all",) for name in _named(policy)))
    with display.progress("replaying", in_bytes=False) as update:
        outcomes = list[PolicyOutcome]()
        for name in named:
            update(len(outcomes), len(named), name)
            outcomes.append(replay(functions, name))
    calls, span_s = (
        sum(len(one.arrivals) for one in functions),
        max(one.arrivals[-1] - one.arrivals[0] for one in functions),
    )
    if as_json:
        facts = {"functions": len(functions), "calls": calls, "span_s": span_s}
        return display.print_json({**facts, "policies": [outcome.figures() for outcome in outcomes]})
    click.echo(
        f"{display.counted(len(functions), 'function')}, {display.counted(calls, 'call')} in {display.duration(span_s)}"
    )
    rungs = list(dict.fromkeys(rung for outcome in outcomes for rung in outcome.rung_s))
    columns = ("", "bill", "holding", "waiting", "cold starts", SLOW_TITLE, "p50", "p95", "p99", *rungs)
    return display.print_table(columns, [_outcome_row(outcome, rungs) for outcome in outcomes])


def _named(policy: str) -> tuple[str, ...]:
    return POLICIES if policy == "all" else (policy,)


def _outcome_row(outcome: PolicyOutcome, rungs: list[str]) -> tuple[str, ...]:
    waits = (display.milliseconds(outcome.wait_s(share) * 1e3) for share in (0.5, 0.95, 0.99))
    return (
        outcome.name, _money(outcome.bill), _money(outcome.holding), f"{outcome.waiting_s:.1f} s",
        str(outcome.cold_starts), str(outcome.slow), *waits,
        *(display.duration(outcome.rung_s.get(rung, 0.0)) for rung in rungs),
    )  # fmt: skip


def _money(amount: float) -> str:
    """Return an amount with three digits that count, without an exponent."""
    digits = 2 - math.floor(math.log10(amount)) if 0 < amount < 1 else 2
    return f"{amount:.{digits}f}"

"""The command that shows the usage and the cost of functions: `pilotflame usage`."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import click

from ...ground.billing.usage import HOUR_S
from ..client import display, options
from ..client.client import Client

TIMES = ("busy", "idle", "starting", "zygote only", "files only")
CALLS = ("calls", "cold starts", "waited")
TOKENS = ("prompt tokens", "cached tokens", "generated tokens")
# A smaller amount is only the rounding error of a difference of floats.
NO_MONEY = 1e-12
MONEY = ("using", "holding", "cost", "always on", "saved")


@click.command()
@click.argument("name", metavar="[FUNCTION]", required=False)
@click.option(
    "--since", type=options.Moment(), help="From then on: 7d, 12h or 2026-11-01.  [default: 30 days ago]"
)
@click.option("--until", type=options.Moment(), help="Up to then.")
@click.option(
    "--by", type=click.Choice(["function", "day", "hour", "owner"]), default="function",
    help="What a row is; an owner is the id of the API key that deployed.",
)  # fmt: skip
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print CSV, with all figures in seconds, GB seconds and money."
)
@options.gateway
def usage(
    *, name: str | None, since: float | None, until: float | None, by: str, as_csv: bool, client: Client,
    as_json: bool,
) -> None:  # fmt: skip
    """Show what functions have used and cost, and what always-on workers would have cost.

    FUNCTION may be a deleted function. Busy, idle and starting are summed times of workers. Zygote only and files only
    are times without a worker. Using is the cost of workers while they were busy or starting. Holding is the cost of
    idle workers, zygotes, standbys and files. The bases, which functions share, and the gateway have rows of their own.
    Always on is the cost with one worker ready all the time. The gateway keeps figures by hour for 14 days, and by day
    (in UTC) for 400 days. Prices and their currency are settings of the gateway: `price_…`, `currency`.

    \b
    Examples:
      pilotflame usage --since 7d
      pilotflame usage hello --by day --csv
    """
    query = {"function": name, "since": since, "until": until, "by": by}
    found = client.get("v1", "usage", **{key: value for key, value in query.items() if value is not None})
    if as_json:
        return display.print_json(found)
    if as_csv:
        return display.echo(_csv(by, found), nl=False)
    # Most functions have no tokens, so show the columns of tokens only if there are some.
    tokens = TOKENS if found["total"]["prompt_tokens"] else ()
    rows = [_row(row["key"] or "-", row["usage"], tokens) for row in found["rows"]]
    if not rows:
        return display.say("nothing was used in that time")
    money = (f"{name} {found['currency']}" for name in MONEY)
    columns = (by, *TIMES, "memory GB h", *CALLS, *tokens, *money)
    return display.print_table(columns, [*rows, _row("all", found["total"], tokens)])


def _row(key: str, used: dict[str, float], tokens: Sequence[str]) -> tuple[str, ...]:
    times = (display.duration(used[f"{kind}_s"]) for kind in ("busy", "idle", "starting", "zygote", "local"))
    memory = f"{used['memory_gb_s'] / HOUR_S:.3g}"
    calls = (f"{used[kind]:.0f}" for kind in ("invocations", "cold_starts"))
    saved = used["always_on_cost"] - used["cost"]
    share = (
        f" ({saved / used['always_on_cost']:.0%})"
        if used["always_on_cost"] and abs(saved) >= NO_MONEY
        else ""
    )
    costs = (used["cost"] - used["holding_cost"], used["holding_cost"], used["cost"], used["always_on_cost"])
    money = (*map(_money, costs), _money(saved) + share)
    counts = (f"{used[name.replace(' ', '_')]:.0f}" for name in tokens)
    cells = (*times, memory, *calls, display.duration(used["waiting_s"]), *counts)
    if key.startswith("("):
        # For the node's own processes, show only memory and money, because they have neither workers nor calls.
        cells = tuple(memory if cell is memory else "-" for cell in cells)
    return (key, *cells, *money)


def _money(amount: float) -> str:
    """Return an amount with two decimals, or two significant digits if it is below 1: 12.30, 0.0012, 0."""
    if abs(amount) < NO_MONEY:
        return "0"
    return f"{amount:.2f}" if abs(amount) >= 1 else f"{amount:.2g}"


def _csv(by: str, found: dict[str, Any]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow((by, *found["total"]))
    table.writerows((row["key"], *row["usage"].values()) for row in found["rows"])
    return text.getvalue()

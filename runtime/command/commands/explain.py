"""The command that lists the scaling decisions for a function, with their reasons: `pilotflame explain`."""

from __future__ import annotations

import time

import click

from ..client import display, options
from ..client.client import Client

_CAUSES = {"load": "the load", "plan": "the keep-alive policy", "window": "the recent load (window)"}


@click.command()
@options.function
@click.option(
    "--since",
    type=options.Moment(),
    help="Only what was decided from then on: 10m, 2h, 3d or 2026-11-22T10:00.",
)
@click.option(
    "-n", "--lines", type=click.IntRange(1, 10_000), default=50, help="How many decisions, the last ones."
)
@options.gateway
def explain(*, name: str, since: float | None, lines: int, client: Client, as_json: bool) -> None:
    """List what the gateway decided about FUNCTION, with the figures behind it.

    Each line is a decision to start or stop workers, or to hold the function on another rung of its ladder. For each
    function, the gateway stores thousands of decisions on disk.

    \b
    Examples:
      pilotflame explain embed --since 1h
      pilotflame explain embed --since 2d --json
    """
    query = {} if since is None else {"since": since}
    found = client.get("v1", "functions", name, "decisions", lines=lines, **query)["decisions"]
    if as_json:
        for decision in found:
            display.print_json(decision)
    else:
        for decision in found:
            display.echo(f"{_moment(decision['at'])}  {decision['text']}")
        status = client.get("v1", "functions", name)
        desired, failing, stopped = status["desired"], status.get("failing"), status["stopped"]
        if failing:
            display.say(
                f"now: {display.counted(failing['failures'], 'start')} failed in a row: {failing['error']}"
            )
        if stopped:
            display.say(f"now: it refuses calls: {stopped}")
        # Without workers, leave out the causes that let workers stay.
        causes = [one for one in desired["because"] if desired["held"] or " lets " not in one]
        because = "; ".join(map(_in_words, causes)) or "nothing wants one"
        display.say(f"now: {display.counted(desired['held'], 'worker')} ({because})")
        if not found:
            display.say(f"nothing was decided about {name} {'yet' if since is None else 'since then'}")


def _in_words(reason: str) -> str:
    """Return a reason such as "plan lets 1 stay". If _CAUSES has a phrase for its first word, replace the word by the phrase."""
    cause, _, rest = reason.partition(" ")
    return f"{_CAUSES.get(cause, cause)} {rest}"


def _moment(at: str) -> str:
    """Return the date and the time of day, or only the time of day if the date is today."""
    text, today = display.local_time(at)[:19], display.local_time(time.time())[:10]
    return text[11:] if text[:10] == today else text

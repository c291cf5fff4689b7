"""The commands of webhooks: `pilotflame webhooks list|redeliver|secret`."""

from __future__ import annotations

from typing import Any

import click

from ..jobs.webhook_delivery import DeliveryState
from . import display, options

MAX_ERROR_CHARS = 40
"""In a table; --json has all of it."""


@click.group()
def webhooks() -> None:
    """See what became of the webhooks of a function's jobs, send one again, and show how they are signed.

    \b
    Example:
      pilotflame webhooks list hello --state dead
    """


@webhooks.command("list")
@click.argument("name")
@click.option("--job", "job_id", default="", metavar="ID", help="Only those of this job.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(list(DeliveryState), case_sensitive=False),
    help="Only those; may be repeated.  [default: all]",
)  # fmt: skip
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many.")
@options.gateway
@options.as_json
def list_deliveries(
    *, name: str, job_id: str, states: tuple[str, ...], limit: int, url: str, as_json: bool
) -> None:
    """List deliveries, the newest first.

    To whom each goes, how often that was tried, and what the last answer was. One that is PENDING is tried again by itself; DEAD is one that was given up. --json has the log of its attempts.

    \b
    Examples:
      pilotflame webhooks list hello
      pilotflame webhooks list hello --job job-… --json
    """
    with options.connect(url) as client:
        found = client.deliveries(name, job_id=job_id, states=[str(state) for state in states], limit=limit)
    if as_json:
        return display.print_json({"deliveries": found})
    if not found:
        return display.say("no such deliveries: pilotflame run NAME EVENT --webhook URL")
    columns = ("id", "job", "event", "state", "age", "tries", "last answer", "next try", "to")
    display.print_table(columns, [_row(delivery) for delivery in found])
    return None


@webhooks.command("redeliver")
@click.argument("name")
@click.argument("delivery_id", metavar="ID")
@options.gateway
@options.as_json
def redeliver(*, name: str, delivery_id: str, url: str, as_json: bool) -> None:
    """Send a delivery again now.

    It has the same id and body, whatever became of it before, and is tried as often as a new one.

    \b
    Example:
      pilotflame webhooks redeliver hello msg_…
    """
    with options.connect(url) as client:
        delivery = client.redeliver(name, delivery_id)
    if as_json:
        return display.print_json(delivery)
    click.echo(f"{delivery['id']} goes to {delivery['url']} again")
    return None


@webhooks.command("secret")
@click.argument("name")
@options.gateway
@options.as_json
def show_secret(*, name: str, url: str, as_json: bool) -> None:
    """Show the secret that a function's webhooks are signed with.

    Give it to the function's receivers: any library of Standard Webhooks verifies with it. Each function has its own.

    \b
    Example:
      pilotflame webhooks secret hello
    """
    with options.connect(url) as client:
        secret = client.webhook_secret(name)
    if as_json:
        return display.print_json({"function": name, "secret": secret})
    click.echo(secret)
    return None


COMMANDS = (webhooks,)


def _row(delivery: dict[str, Any]) -> tuple[str, ...]:
    status, error = delivery["last_status"], delivery["last_error"]
    return (
        delivery["id"],
        delivery["job_id"],
        delivery["event"],
        delivery["state"],
        display.ago(delivery["created_at"]),
        str(delivery["attempts"]),
        str(status) if status is not None else _short(error) or "-",
        delivery["next_at"] or "-",
        delivery["url"],
    )


def _short(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[: MAX_ERROR_CHARS - 1]}…"

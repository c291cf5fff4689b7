"""The commands about webhooks: `pilotflame webhooks list|redeliver|secret`."""

from __future__ import annotations

from typing import Any

import click

from ...jobs.webhooks.delivery import DeliveryState
from ..client import display, options
from ..client.client import Client

# The table shows at most this number of characters of an error. --json prints the whole error.
MAX_ERROR_CHARS = 40


@click.group()
def webhooks() -> None:
    """List deliveries of webhooks, send one again, show the secret that signs them.

    Example: pilotflame webhooks list hello --state dead
    """


@webhooks.command("list")
@options.function
@click.option("--job", "job_id", default="", metavar="ID", help="Only the deliveries of this job.")
@options.states("--state", DeliveryState)
@options.limit
@options.gateway
def list_deliveries(
    *, name: str, job_id: str, states: tuple[str, ...], limit: int, client: Client, as_json: bool
) -> None:
    """List the deliveries for a function's jobs and alerts, the newest first.

    Shows the receiver, the number of attempts and the last response. The gateway retries a PENDING delivery, but not a
    DEAD delivery. --json also has the log of attempts.

    \b
    Examples:
      pilotflame webhooks list hello
      pilotflame webhooks list hello --job job-… --json
    """
    only = {"job": job_id} if job_id else {}
    found = client.get("v1", "functions", name, "webhooks", state=states, limit=limit, **only)["deliveries"]
    columns = ("id", "of", "event", "state", "age", "tries", "last response", "next try", "to")
    empty = "no such deliveries: pilotflame run NAME EVENT --webhook URL"
    display.print_list({"deliveries": found}, columns, map(_row, found), empty=empty, as_json=as_json)


@webhooks.command("redeliver")
@options.function
@click.argument("delivery_id", metavar="ID")
@options.gateway
def redeliver(*, name: str, delivery_id: str, client: Client, as_json: bool) -> None:
    """Send a delivery again now.

    The delivery may have any state. It keeps its id and body, and gets all the retries of a new delivery.

    Example: pilotflame webhooks redeliver hello msg_…
    """
    delivery = client.post("v1", "functions", name, "webhooks", delivery_id, "redeliver")
    display.print_result(delivery, f"{delivery['id']} is sent to {delivery['url']} again", as_json=as_json)


@webhooks.command("secret")
@options.function
@options.gateway
def show_secret(*, name: str, client: Client, as_json: bool) -> None:
    """Show the secret that signs a function's webhooks.

    Give the secret to the receivers: every library of Standard Webhooks can verify deliveries with it. Each function
    has its own secret.

    Example: pilotflame webhooks secret hello
    """
    secret = client.get("v1", "functions", name, "webhooks", "secret")["secret"]
    display.print_result({"function": name, "secret": secret}, secret, as_json=as_json)


def _row(delivery: dict[str, Any]) -> tuple[str, ...]:
    status, error = delivery["last_status"], delivery["last_error"]
    if len(error) > MAX_ERROR_CHARS:
        error = f"{error[: MAX_ERROR_CHARS - 1]}…"
    of = delivery["job_id"] or delivery["subject"]
    names = (delivery["id"], of, delivery["event"], delivery["state"])
    response = error or "-" if status is None else str(status)
    counts = (display.age(delivery["created_at"]), str(delivery["attempts"]), response)
    return (*names, *counts, delivery["next_at"] or "-", delivery["url"])

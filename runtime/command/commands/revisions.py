"""The commands about a function's revisions: `pilotflame restart|rollback|revisions|reset|pause|resume`."""

from __future__ import annotations

from typing import Any

import click

from ..client import display, options
from ..client.client import Client


@click.command()
@options.function
@options.gateway
def restart(*, name: str, client: Client, as_json: bool) -> None:
    """Replace a function's processes, without dropping a call.

    The new workers have the function's present secrets. First, one new worker for each ready worker must become ready.
    Then the old workers finish their calls and end. If the new workers do not start, the old workers stay.

    Example: pilotflame restart greeter
    """
    with display.spinner(f"restarting {name}"):
        found = client.replace(name, "restart")
    _print_live(found, f"{name} {found['revision']} runs in new processes", as_json=as_json)


@click.command()
@options.function
@click.argument("revision", required=False)
@options.gateway
def rollback(*, name: str, revision: str | None, client: Client, as_json: bool) -> None:
    """Make an older revision of a function live.

    REVISION is the revision's id or number, as `pilotflame revisions` lists it. Without REVISION, the revision before
    the live revision is taken. It is started first. If the start fails, the live revision stays.

    \b
    Examples:
      pilotflame rollback greeter
      pilotflame rollback greeter r3
    """
    with display.spinner(f"rolling {name} back"):
        found = client.replace(name, "rollback", revision=revision)
    _print_live(found, f"{name} {found['revision']} is live again", as_json=as_json)


@click.command()
@options.function
@options.gateway
def reset(*, name: str, client: Client, as_json: bool) -> None:
    """Start workers of a function again at once, although the last starts failed.

    After five failed starts in a row, calls are refused for a while. Use this command after you have removed a cause
    outside the function, such as a full disk, a licence server or a missing file. A deploy has the same effect.

    If today's budget is used up, the function gets the same budget once more.

    Example: pilotflame reset greeter
    """
    found = client.replace(name, "reset")
    display.print_result(found, f"{name} starts workers again", as_json=as_json)


@click.command()
@options.function
@options.gateway
def pause(*, name: str, client: Client, as_json: bool) -> None:
    """Let a function run nothing until `pilotflame resume`.

    New calls are refused. Running calls end, and then all processes of the function end. Jobs, and messages in the
    queues of its event sources, wait. Schedules and `scale.min` start no worker. The function stays paused after a
    restart of the gateway and after a deploy.

    Example: pilotflame pause greeter
    """
    found = client.replace(name, "pause")
    display.print_result(found, f"{name} is paused", as_json=as_json)


@click.command()
@options.function
@options.gateway
def resume(*, name: str, client: Client, as_json: bool) -> None:
    """Let a paused function run again.

    Its jobs and the messages of its event sources run now, and the next call starts a worker.

    Example: pilotflame resume greeter
    """
    found = client.replace(name, "resume")
    display.print_result(found, f"{name} accepts calls again", as_json=as_json)


@click.command()
@options.function
@options.gateway
def revisions(*, name: str, client: Client, as_json: bool) -> None:
    """List a function's revisions, the newest first.

    The size of a revision does not include weights that it shares with a newer revision.

    Example: pilotflame revisions greeter
    """
    found = client.get("v1", "functions", name, "revisions")["revisions"]
    columns = ("revision", "state", "deployed", "size", "weights")
    display.print_list({"revisions": found}, columns, map(_row, found), empty="no revisions", as_json=as_json)


def _row(revision: dict[str, Any]) -> tuple[str, ...]:
    size, snapshot = display.size(revision["size_bytes"]), display.snapshots(revision) or "none"
    return (revision["revision"], revision["state"], revision["created_at"], size, snapshot)


def _print_live(status: dict[str, Any], text: str, *, as_json: bool) -> None:
    if not as_json:
        display.warn(status["warnings"])
    display.print_result(status, text, as_json=as_json)

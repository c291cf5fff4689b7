"""The commands that talk to a gateway: deploy, invoke, list, status, logs, delete, warmup."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from . import display, options

# What was written for another platform, as its people call it.
PLATFORMS = {"runpod": "RunPod", "cog": "Cog", "lambda": "Lambda"}


@click.command()
@options.function_folder
@options.settings
@options.name
@options.snapshot
@click.option(
    "--install", is_flag=True, help="Install requirements.txt, in an environment shared by its digest."
)
@click.option(
    "--no-check", is_flag=True, help="Start no worker now: a mistake in setup shows at the first call."
)
@click.option(
    "--upload", is_flag=True, help="Send the folder's files even if the gateway is on this machine."
)
@options.gateway
@options.as_json
def deploy(
    *,
    folder: Path,
    settings: tuple[str, ...],
    name: str | None,
    snapshot: str | None,
    install: bool,
    no_check: bool,
    upload: bool,
    url: str,
    as_json: bool,
) -> None:
    """Make FOLDER a function, or a new revision of it.

    The handler is imported and built before it answers anything; if that fails, the old revision stays.
    A gateway on this machine reads the folder itself, any other is sent its files.

    \b
    Example:
      pilotflame deploy hello --set scale.max=8 --name greeter
    """
    with options.connect(url) as client, display.waiting(f"deploying {folder}"):
        local = client.on_loopback and not upload
        status = client.deploy(
            folder,
            overrides=options.overrides(settings, name, snapshot, local=local),
            install=install,
            check=not no_check,
            upload=not local,
        )
    if as_json:
        return display.print_json(status)
    display.warn(status["warnings"])
    if (platform := PLATFORMS.get(status.get("dialect", ""))) is not None:
        display.say(f"recognised a {platform} handler: {status['entry']}")
    click.echo(
        f"{status['name']} {status['revision']} is deployed; call it: pilotflame invoke {status['name']} JSON"
    )
    return None


@click.command()
@click.argument("name")
@click.argument("event", required=False)
@click.option("--timing", is_flag=True, help="Show where the time went, as bars on stderr.")
@click.option("--content-type", default="application/json", show_default=True, help="What the input is.")
@click.option("--timeout", "timeout_s", type=float, metavar="SECONDS", help="How long the call may take.")
@options.gateway
@options.as_json
def invoke(
    *,
    name: str,
    event: str | None,
    timing: bool,
    content_type: str,
    timeout_s: float | None,
    url: str,
    as_json: bool,
) -> None:
    """Call a function and print its answer; a streamed one piece by piece, one JSON value a line.

    EVENT is JSON, or @FILE, or - for standard input; without it the function gets null.
    With --json the answer comes in an envelope with its timing.

    \b
    Examples:
      pilotflame invoke hello '{"name": "Ada"}' --timing
      pilotflame invoke hello @test_input.json
      cat photo.jpg | pilotflame invoke classify - --content-type image/jpeg
    """
    with (
        options.connect(url) as client,
        client.call(name, options.event_body(event), content_type=content_type, timeout_s=timeout_s) as reply,
    ):
        if as_json:
            display.print_json(
                {
                    "answer": display.printable(reply.value()),
                    "cold": reply.cold,
                    "timing_ms": reply.timing_ms,
                    "worker": reply.worker,
                    "request_id": reply.request_id,
                }
            )
        elif reply.streaming:
            for piece in reply.pieces():
                display.print_json(piece)
        else:
            display.print_answer(reply.value())
        if timing:
            display.print_timing(reply.timing_ms, cold=reply.cold, worker=reply.worker)


@click.command("list")
@options.gateway
@options.as_json
def list_functions(url: str, as_json: bool) -> None:
    """List the functions, with what each holds now.

    \b
    Example:
      pilotflame list
    """
    with options.connect(url) as client:
        functions = client.functions()
    if as_json:
        return display.print_json({"functions": functions})
    if not functions:
        return display.say("no functions yet: pilotflame deploy FOLDER")
    columns = (
        "function",
        "revision",
        "workers",
        "at rest",
        "queued",
        "running",
        "activations",
        "last cold start",
    )
    display.print_table(columns, [_row(status) for status in functions])
    return None


@click.command()
@click.argument("name")
@click.option("--memory", is_flag=True, help="Also measure what each of its processes holds.")
@options.gateway
@options.as_json
def status(*, name: str, memory: bool, url: str, as_json: bool) -> None:
    """Show one function: revision, workers, settings, processes.

    \b
    Example:
      pilotflame status hello --memory
    """
    with options.connect(url) as client:
        found = client.status(name, memory=memory)
    if as_json:
        return display.print_json(found)
    display.print_table(("", ""), _facts(found))
    if memory:
        columns = ("process", "pid", "own memory", "shared fairly", "resident")
        click.echo()
        display.print_table(columns, [_process_row(process) for process in found["processes"]])
    display.warn(found["warnings"])
    return None


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on with every new line, until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(0, 10_000),
    default=100,
    show_default=True,
    help="How many old lines.",
)
@options.gateway
@click.option("--json", "as_json", is_flag=True, help="Print each line as JSON, for programs.")
def logs(*, name: str, follow: bool, lines: int, url: str, as_json: bool) -> None:
    """Print what a function's processes wrote.

    \b
    Example:
      pilotflame logs hello -f
    """
    with options.connect(url) as client:
        for line in client.logs(name, lines=lines, follow=follow):
            if as_json:
                display.print_json(line)
            else:
                click.echo(display.log_line(line))


@click.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@options.gateway
@options.as_json
def delete(*, name: str, yes: bool, url: str, as_json: bool) -> None:
    """Take a function away, with all its revisions. What it is doing, it may finish.

    \b
    Example:
      pilotflame delete hello --yes
    """
    if not yes and not sys.stdin.isatty():
        raise click.UsageError("Nobody is there to be asked: say --yes.")
    with options.connect(url) as client:
        client.status(name)  # nobody should have to confirm what cannot be done
        if not yes:
            click.confirm(f"Delete {name} and all its revisions?", abort=True, err=True)
        client.delete(name)
    if as_json:
        return display.print_json({"deleted": name})
    click.echo(f"{name} is deleted")
    return None


@click.command()
@click.argument("name")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="How many to have.")
@options.gateway
@options.as_json
def warmup(*, name: str, workers: int, url: str, as_json: bool) -> None:
    """Start workers now, ahead of the requests that will need them.

    \b
    Example:
      pilotflame warmup hello --workers 2
    """
    with options.connect(url) as client:
        found = client.warmup(name, workers)
    if as_json:
        return display.print_json({"workers": found})
    click.echo(f"{name}: {found['ready']} ready, {found['starting']} starting")
    return None


COMMANDS = (deploy, invoke, list_functions, status, logs, delete, warmup)


def _row(status: dict[str, Any]) -> tuple[str, ...]:
    return (
        status["name"],
        status["revision"],
        _workers(status),
        _at_rest(status),
        str(status["queued"]),
        str(status["in_flight"]),
        str(status["activations"]),
        display.milliseconds(status["last_cold_start_ms"]),
    )


def _workers(status: dict[str, Any]) -> str:
    workers = status["workers"]
    said = [f"{workers[state]} {state}" for state in ("starting", "draining") if workers[state]]
    return ", ".join([f"{workers['ready']} of {status['settings']['scale']['max']}", *said])


def _at_rest(status: dict[str, Any]) -> str:
    held = [name for name in ("zygote", "standby") if status[name]]
    return " + ".join(held) or "files only"


def _facts(status: dict[str, Any]) -> list[tuple[str, str]]:
    batch = f", batches of up to {status['batch']}" if status["batch"] else ""
    return [
        ("function", status["name"]),
        ("revision", f"{status['revision']}, deployed {status['created_at']}"),
        ("handler", f"{_handler(status)}, {status['kind'].replace('_', ' ')}{batch}"),
        ("snapshot", status["snapshot"] or "none"),
        ("workers", _workers(status)),
        ("at rest", _at_rest(status)),
        ("requests", f"{status['queued']} queued, {status['in_flight']} running"),
        (
            "activations",
            f"{status['activations']}, the last cold start {display.milliseconds(status['last_cold_start_ms'])}",
        ),
    ]


def _handler(status: dict[str, Any]) -> str:
    if (platform := PLATFORMS.get(status.get("dialect", ""))) is not None:
        return f"{status['entry']} ({platform})"
    return str(status["settings"]["handler"])


def _process_row(process: dict[str, Any]) -> tuple[str, ...]:
    memory = (f"{process[key]:.1f} MB" for key in ("uss_mb", "pss_mb", "rss_mb"))
    return (process["name"], str(process["pid"]), *memory)

"""The command that prints logs: `pilotflame logs`."""

from __future__ import annotations

from typing import Any

import click

from ...ground.telemetry.log_files import LogLevel
from ..client import display, options
from ..client.client import Client


@click.command()
@click.argument("name", metavar="[FUNCTION]", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with every new line, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(0, 10_000), default=100, help="How many old lines.")
@click.option(
    "--since", type=options.Moment(), help="Only lines from then on: 10m, 2h, 3d or 2026-11-22T10:00."
)
@click.option("--until", type=options.Moment(), help="Only lines up to then.")
@click.option("--request", metavar="ID", help="Only the lines of one invocation or job.")
@click.option("--worker", metavar="NAME", help="Only the lines of one worker (X-Worker-Id of a response).")
@click.option(
    "--level",
    type=click.Choice([level.value for level in LogLevel]),
    help="Only lines of this level and above.",
)
@click.option(
    "--audit", "kind", flag_value="audit", help="Show who deployed, deleted, or changed keys and secrets."
)
@click.option("--access", "kind", flag_value="access", help="Show the requests (PILOTFLAME_ACCESS_LOG=1).")
@click.option("--raw", is_flag=True, help="Print control characters as the function has printed them.")
@options.gateway
def logs(
    *, name: str | None, kind: str | None, raw: bool, client: Client, as_json: bool, **query: Any
) -> None:
    """Print the log of a function, or of the gateway.

    Without FUNCTION, print the gateway's own messages. FUNCTION may be a deleted function. A function's log has the
    output of its processes, the tracebacks of failed calls, and the reasons why workers ended.

    \b
    Examples:
      pilotflame logs hello -f
      pilotflame logs hello --since 2h --level warning
      pilotflame logs hello --request 1f0c5b6a7d8e9f00
      pilotflame logs --audit
    """
    if name is not None and kind is not None:
        raise click.UsageError(f"--{kind} is a log of the gateway: give no FUNCTION.")
    lines = client.logs(name, **query) if name is not None else client.gateway_log(kind or "gateway", **query)
    for line in lines:
        if as_json:
            display.print_json(line)
        else:
            display.echo(_shown(line), raw=raw)


def _shown(line: dict[str, Any]) -> str:
    level = "" if line["level"] == "info" else f"{line['level'].upper()} "
    request = f"[{line['request_id']}] " if line["request_id"] else ""
    return f"{display.local_time(line['at'])} {line['source']:<12} {request}{level}{line['text']}"

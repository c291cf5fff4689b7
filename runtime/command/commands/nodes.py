"""The command that lists the gateways that share a database: `pilotflame nodes`."""

from __future__ import annotations

import click

from ..client import display, options
from ..client.client import Client

COLUMNS = ("gateway", "version", "state", "duties")


@click.command()
@options.gateway
def nodes(*, client: Client, as_json: bool) -> None:
    """List the gateways that share a database, with their duties: work that one gateway does for all.

    The gateway that has answered is marked with *. A gateway whose state is "lost" has not renewed its lease: the others run its jobs again.

    \b
    Examples:
      pilotflame nodes
      pilotflame nodes --json
    """
    found = client.get("v1", "nodes")
    if as_json:
        return display.print_json(found)
    rows = [
        (
            f"{'* ' if one['this'] else '  '}{one['name']}", one["version"], "live" if one["alive"] else "lost",
            ", ".join(one["duties"]) or "-",
        )
        for one in found["nodes"]
    ]  # fmt: skip
    return display.print_table(COLUMNS, rows)

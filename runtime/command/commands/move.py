"""The command that moves what a gateway has stored into the database of several gateways: `pilotflame move`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import click

from ....errors import GatewayError
from ...ground.settings.state_dir import check_user, locked_state_dir
from ...ground.storing.open_documents import open_documents
from ...jobs.moving.state_move import StateMove
from ..client import display, options


@click.command()
@options.state_dir
@options.as_json
def move(*, state_dir: Path | None, as_json: bool) -> None:
    """Move the jobs, keys and secrets of a stopped gateway into the database of several.

    The setting `database` (PILOTFLAME_DATABASE) names the database. All jobs, results and webhooks are moved, or none. If the command
    is interrupted, run it again. Then start the gateway with the setting, which brings its functions. The files of the jobs stay under
    other names.

    Example: pilotflame move --state-dir /srv/pilotflame
    """
    settings = options.gateway_settings(state_dir=state_dir)
    folder, database = settings.state_dir, settings.database
    if database is None:
        remedy = "Set PILOTFLAME_DATABASE=postgresql://user:password@host/name."
        raise GatewayError("There is no database to move to.", remedy=remedy)
    if not (folder / "functions").is_dir():
        raise GatewayError(f"{folder} is not a gateway's state folder.", remedy="Name it with --state-dir.")
    check_user(folder)
    with (
        locked_state_dir(folder) as state,
        closing(open_documents(state, database)) as documents,
        display.progress(f"moving {state}", in_bytes=False) as update,
    ):
        found = StateMove(state, database.get_secret_value(), documents).run(update)
    done = f"is moved, with {found['rows']['jobs']} jobs" if found else "was moved before"
    facts = {"state_dir": str(state), "moved": found is not None, **(found or {})}
    text = f"{state} {done}; start its gateway with PILOTFLAME_DATABASE"
    display.print_result(facts, text, as_json=as_json)

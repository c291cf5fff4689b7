"""The command that moves what a gateway has stored into the database of several gateways: `pilotflame move`.

The database gets all of it in one transaction. Right before the commit, the command writes the id of the move to the file MOVING_FILE, and
the transaction has a document with this id. If the command dies with this file, nobody knows where the jobs are, so no gateway starts on
the state folder. The next `move` finds the document, and renames the files of the jobs. Or it does not find it, and begins again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import orjson

from ....errors import GatewayError
from ...ground.access.keyring import ACCESS
from ...ground.settings.state_dir import MOVING_FILE, check_user, locked_state_dir
from ...ground.storing import private_files
from ...ground.storing.documents import Documents
from ...ground.storing.file_documents import FileDocuments
from ...ground.storing.open_documents import open_documents
from ...jobs.sql.queries import last_number
from ...jobs.sql.rows import large_bodies
from ...jobs.sql.tables import read_tables, row_counts
from ...jobs.sqlite.jobs_file import JobsFile
from ...jobs.webhooks.signing import SECRET_FILE
from ...node.functions.store import Store
from ..client import display, options

FUNCTIONS_FOLDER = "functions"
MEMBER_FILE = "incarnation"
MOVES = "moves/"
DUPLICATE = "23505"
"""PostgreSQL's code for a key that is there already."""
Update = Callable[..., None]


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
    folder = settings.state_dir
    if settings.database is None:
        remedy = "Set PILOTFLAME_DATABASE=postgresql://user:password@host/name."
        raise GatewayError("There is no database to move to.", remedy=remedy)
    if not (folder / FUNCTIONS_FOLDER).is_dir():
        raise GatewayError(f"{folder} is not a gateway's state folder.", remedy="Name it with --state-dir.")
    check_user(folder)
    with (
        locked_state_dir(folder) as state,
        closing(open_documents(state, settings.database)) as documents,
        display.progress(f"moving {state}", in_bytes=False) as update,
    ):
        found = _Move(state, settings.database.get_secret_value(), documents).run(update)
    done = (
        f"{found['rows']['jobs']} jobs of {state} are in the database"
        if found
        else f"{state} was moved before"
    )
    facts = {"state_dir": str(state), "moved": found is not None, **(found or {})}
    display.print_result(facts, f"{done}; start its gateway with PILOTFLAME_DATABASE", as_json=as_json)


class _Move:
    """The move of a locked state folder."""

    def __init__(self, state: Path, url: str, documents: Documents) -> None:
        """`documents` are those of the database at `url`."""
        self._state, self._url, self._documents = state, url, documents
        self._moving, self._file = state / MOVING_FILE, JobsFile(state)

    def run(self, update: Update) -> dict[str, Any] | None:
        """Move everything, and return what was moved. Return None if an earlier call has moved it. Blocks."""
        if (earlier := private_files.read(self._moving)) is not None:
            move_id = earlier.decode()
            # This waits until the interrupted transaction has ended.
            if (told := self._documents.update(f"{MOVES}{move_id}", lambda stored: stored)) is not None:
                return self._retire(move_id, orjson.loads(told))
            private_files.remove(self._moving)
        if self._file.moved:
            return None
        if not self._file.path.exists():
            raise GatewayError(f"{self._file.path} does not exist.", remedy="Nothing is left to move.")
        self._check_functions()
        move_id = secrets.token_hex(8)
        return self._retire(move_id, self._copy(move_id, update))

    def _retire(self, move_id: str, found: dict[str, Any]) -> dict[str, Any]:
        self._file.retire(move_id)
        private_files.remove(self._moving)
        return found

    def _copy(self, move_id: str, update: Update) -> dict[str, Any]:
        # They import psycopg, which `open_documents` has found.
        from ...ground.storing.postgres import PostgresConnection, reported  # noqa: PLC0415
        from ...ground.storing.postgres_documents import add_documents  # noqa: PLC0415
        from ...jobs.postgres.database import PostgresDatabase  # noqa: PLC0415
        from ...jobs.postgres.rows_copy import copy_rows  # noqa: PLC0415

        own = self._own_documents()
        theirs = {name: self._documents.get(name) for name in own}
        self._check_documents([name for name in own if theirs[name] not in (None, own[name])])
        with self._file.open() as connection:
            rows, names = row_counts(connection), large_bodies(connection)
            found = {"rows": rows, "large_bodies": len(names), "documents": sorted(own)}
            total, done = sum(rows.values()) + len(names), 0

            def copied(count: int) -> None:
                nonlocal done
                done = min(done + count, total)
                update(done, total, f"{done} of {total} rows")

            def at_end(target: PostgresConnection) -> None:
                told = {f"{MOVES}{move_id}": orjson.dumps(found)}
                self._check_documents(add_documents(target, own | told))
                private_files.write(self._moving, move_id.encode())

            bodies, last = self._file.bodies(names), last_number(connection)
            try:
                with reported("The jobs could not be moved", "Run `pilotflame move` again."):
                    copy_rows(
                        PostgresDatabase(self._url), read_tables(connection), bodies, last, at_end, copied
                    )
            except GatewayError as error:
                if getattr(error.__cause__, "sqlstate", "") != DUPLICATE:
                    raise
                fault = (
                    f"The database has jobs or webhook deliveries of {self._state} already: {error.message}"
                )
                remedy = "Nothing was moved. Use another database, or another schema of it."
                raise GatewayError(fault, remedy=remedy) from error
        return found

    def _own_documents(self) -> dict[str, bytes]:
        files = FileDocuments(self._state)
        signing = files.get(SECRET_FILE)
        return files.all(ACCESS) | ({} if signing is None else {SECRET_FILE: signing})

    def _check_documents(self, different: Collection[str]) -> None:
        """Raise GatewayError if the database has other keys or secrets."""
        if different:
            raise GatewayError(
                f"The database has other keys or secrets than {self._state}: {', '.join(different)}.",
                remedy="To use those of the database, move these files out of the state folder. To keep these, use another database.",
            )

    def _check_functions(self) -> None:
        """Raise GatewayError if the database has other functions of the same names, which would get the jobs."""
        from ...ground.storing.postgres_revision_index import PostgresRevisionIndex  # noqa: PLC0415

        if (self._state / MEMBER_FILE).exists():
            # They are the same functions: this gateway follows those of the database.
            return
        with closing(PostgresRevisionIndex(self._url, 0)) as index:
            shared = {entry.name for entry in index.changes(0) if not entry.deleted}
        if both := sorted(shared.intersection(Store(self._state, display.say).functions())):
            raise GatewayError(
                f"The state folder and the database have different functions of these names: {', '.join(both)}.",
                remedy="Start without `database`, and delete or rename them here.",
            )

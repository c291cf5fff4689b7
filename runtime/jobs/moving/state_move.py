"""Moves what a gateway has stored into the database of several gateways: jobs, webhooks, alerts, keys, secrets.

One transaction adds everything to the database, and a document with the id of the move. Right before the commit, the
move writes this id to the file MOVING_FILE, and removes the file at its end. If the process dies in between, the file
remains. Then it is not known whether the commit succeeded, so no gateway starts on the state folder. The next move
looks for the document in the database. If it exists, the commit has succeeded, and the move only renames the files of
the jobs. Otherwise, the move begins again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson

from ....errors import GatewayError
from ...ground.access.keyring import ACCESS
from ...ground.settings.state_dir import MOVING_FILE
from ...ground.storing import private_files
from ...ground.storing.documents import Documents
from ...ground.storing.file_documents import FileDocuments
from ...node.functions.store import Store
from ..sql.queries import last_number
from ..sql.rows import large_bodies
from ..sql.tables import read_tables, row_counts
from ..sqlite.store import JobsFile
from ..webhooks.signing import SECRET_FILE

LOG = logging.getLogger(__name__)
MEMBER_FILE = "incarnation"
"""A state folder has this file if its gateway has been one of several."""
MOVES = "moves/"
DUPLICATE = "23505"
"""PostgreSQL's error code for a key that exists already."""
Update = Callable[[int, int, str], object]


class StateMove:
    """The move of a state folder, which the caller has locked."""

    def __init__(self, state: Path, url: str, documents: Documents) -> None:
        """`url` is a connection string of libpq, and `documents` is the store of documents in that database."""
        self._state, self._url, self._documents = state, url, documents
        self._moving, self._file = state / MOVING_FILE, JobsFile(state)

    def run(self, update: Update) -> dict[str, Any] | None:
        """Move everything, and return what was moved. Return None if an earlier call has moved it. Blocks."""
        if (earlier := private_files.read(self._moving)) is not None:
            move_id = earlier.decode()
            # This waits until the interrupted transaction has ended.
            if (known := self._documents.update(f"{MOVES}{move_id}", lambda stored: stored)) is not None:
                return self._retire(move_id, orjson.loads(known))
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
        # Import these modules here, because they need psycopg, which is optional. `open_documents` has checked for psycopg.
        from ...ground.storing.postgres import PostgresConnection, reported  # noqa: PLC0415
        from ...ground.storing.postgres_documents import add_documents  # noqa: PLC0415
        from ..postgres.database import PostgresDatabase  # noqa: PLC0415
        from ..postgres.rows_copy import copy_rows  # noqa: PLC0415

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
                document = {f"{MOVES}{move_id}": orjson.dumps(found)}
                self._check_documents(add_documents(target, own | document))
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
                remedy="To use the keys and secrets of the database, move these files out of the state folder. To keep these, use another database.",
            )

    def _check_functions(self) -> None:
        """Raise GatewayError if the database has other functions of the same names, because these functions would get
        the jobs.
        """
        from ...ground.storing.postgres_revision_index import PostgresRevisionIndex  # noqa: PLC0415

        if (self._state / MEMBER_FILE).exists():
            # Skip the check: this gateway already serves the functions of the database.
            return
        with closing(PostgresRevisionIndex(self._url, 0)) as index:
            shared = {entry.name for entry in index.changes(0) if not entry.deleted}
        if both := sorted(shared.intersection(Store(self._state, LOG.warning).functions())):
            raise GatewayError(
                f"The state folder and the database have different functions of these names: {', '.join(both)}.",
                remedy="Start without `database`, and delete or rename them here.",
            )

"""The store of blobs that several gateways share: a table of PostgreSQL, with a row for each part of a blob."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

import psycopg

from ....errors import JobStoreFailed
from .postgres import BEGIN, PostgresConnection

LOG = logging.getLogger(__name__)
PART_BYTES = 1 << 20
"""The bytes of a row. PostgreSQL's server holds whole rows in memory, several times."""
NEW = "interval '1 hour'"
"""A blob is stored before the row that names it, so `keep` leaves blobs of this age."""
T = TypeVar("T")


class PostgresBlobs:
    """`Blobs` in the table `blobs`. Each call takes a connection of its own from those that are free, or a new one."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._free = queue.SimpleQueue[PostgresConnection]()

    def put(self, name: str, data: bytes) -> None:
        parts = [(name, at, data[at : at + PART_BYTES]) for at in range(0, len(data), PART_BYTES)]
        # The answer of an earlier try may have been lost after its commit.
        insert = "INSERT INTO blobs (name, part, bytes) VALUES (?, ?, ?) ON CONFLICT DO NOTHING"
        self._run(lambda connection: connection.executemany(insert, parts))

    def get(self, name: str) -> bytes | None:
        query = "SELECT bytes FROM blobs WHERE name = ? ORDER BY part"
        parts = self._run(lambda connection: connection.execute(query, (name,)).fetchall())
        return b"".join(part for (part,) in parts) if parts else None

    def delete(self, names: Collection[str]) -> None:
        self._delete("DELETE FROM blobs WHERE name = ANY(?)", names)

    def keep(self, names: Collection[str]) -> None:
        self._delete(f"DELETE FROM blobs WHERE name <> ALL(?) AND created < now() - {NEW}", names)  # noqa: S608

    def close(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()

    def _delete(self, delete: str, names: Collection[str]) -> None:
        try:
            self._run(lambda connection: connection.execute(delete, (list(names),)))
        except JobStoreFailed as error:
            LOG.warning("large bodies could not be deleted: %s", error)

    def _run(self, run: Callable[[PostgresConnection], T]) -> T:
        """Run `run` in a transaction. If a connection that has waited is broken, use a new one."""
        with suppress(queue.Empty, psycopg.OperationalError):
            return self._transaction(run, self._free.get_nowait())
        try:
            return self._transaction(run, PostgresConnection(self._url))
        except psycopg.Error as error:
            message = f"The store of jobs could not be written or read: {str(error).strip()}."
            remedy = "Check whether PostgreSQL runs, and whether its disk is full."
            raise JobStoreFailed(message, remedy=remedy) from error

    def _transaction(self, run: Callable[[PostgresConnection], T], connection: PostgresConnection) -> T:
        try:
            connection.run(BEGIN)
            found = run(connection)
            connection.run("COMMIT")
        except BaseException:
            connection.close()
            raise
        self._free.put(connection)
        return found

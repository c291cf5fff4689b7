"""The store of blobs that several gateways share: a table of PostgreSQL, with a row for each part of a blob."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from typing import TypeVar

from ....errors import JobStoreFailed
from .postgres import PostgresConnection, PostgresPool, reported

LOG = logging.getLogger(__name__)
PART_BYTES = 1 << 20
"""The most bytes of a row. A row is small because the server of PostgreSQL keeps several copies of a whole row in memory."""
NEW = "interval '1 hour'"
"""`keep` does not delete blobs that are younger than this, because a blob is stored before the row that names it."""
T = TypeVar("T")


class PostgresBlobs:
    """`Blobs` in a table."""

    def __init__(self, place: str | PostgresPool, table: str = "blobs") -> None:
        """`place` is a connection string of libpq, or a pool, which `close` closes."""
        self._pool = place if isinstance(place, PostgresPool) else PostgresPool(place)
        self._table = table

    def put(self, name: str, data: bytes) -> None:
        parts = [(name, at, data[at : at + PART_BYTES]) for at in range(0, len(data), PART_BYTES)]
        # An earlier try may have stored the blob if its answer was lost. Then count the blob as new again, so that `keep` does not delete it.
        insert = f"""INSERT INTO {self._table} (name, part, bytes) VALUES (?, ?, ?)
        ON CONFLICT (name, part) DO UPDATE SET created = now()"""  # noqa: S608
        self._run(lambda connection: connection.executemany(insert, parts))

    def get(self, name: str) -> bytes | None:
        query = f"SELECT bytes FROM {self._table} WHERE name = ? ORDER BY part"  # noqa: S608
        parts = self._run(lambda connection: connection.execute(query, (name,)).fetchall())
        return b"".join(part for (part,) in parts) if parts else None

    def delete(self, names: Collection[str]) -> None:
        self._delete("name = ANY(?)", names)

    def keep(self, names: Collection[str]) -> None:
        self._delete(f"name <> ALL(?) AND created < now() - {NEW}", names)

    def close(self) -> None:
        self._pool.close()

    def _delete(self, which: str, names: Collection[str]) -> None:
        delete = f"DELETE FROM {self._table} WHERE {which}"  # noqa: S608
        try:
            self._run(lambda connection: connection.execute(delete, (list(names),)))
        except JobStoreFailed as error:
            LOG.warning("%s could not be deleted: %s", self._table, error)

    def _run(self, run: Callable[[PostgresConnection], T]) -> T:
        with reported("PostgreSQL could not be written or read", kind=JobStoreFailed):
            return self._pool.run(run)

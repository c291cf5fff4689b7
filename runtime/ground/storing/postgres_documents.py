"""Stores the documents that several gateways share in a table of PostgreSQL.

All changes of documents take a lock of the database, so they happen one after the other, also if a document does not exist yet.
Changes are rare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import TypeVar

from .documents import check_document_name
from .postgres import BEGIN, PostgresConnection, PostgresPool, reported

T = TypeVar("T")
_LOCK = "SELECT pg_advisory_xact_lock(hashtext('pilotflame documents ' || current_schema()))"
_BEGIN_CHANGE = f"{BEGIN}; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; {_LOCK}"
"""Begins a transaction whose statements see all that was committed before it got the lock, whatever the database's default isolation level."""
_PUT = (
    "INSERT INTO documents (name, data) VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET data = excluded.data"
)
_COUNT_CHANGE = """INSERT INTO document_folders (folder, changes) SELECT unnest(?::text[]), 1
ON CONFLICT (folder) DO UPDATE SET changes = document_folders.changes + 1"""


class PostgresDocuments:
    """A `Documents` in the table `documents`, which a migration has made."""

    def __init__(self, url: str) -> None:
        """`url` is a connection string of libpq."""
        self._pool = PostgresPool(url)

    def all(self, prefix: str) -> dict[str, bytes]:
        check_document_name(prefix.removesuffix("/"))
        query = "SELECT name, data FROM documents WHERE name ^@ ? ORDER BY name"
        place = f"the documents {prefix}"
        rows = self._read(place, lambda connection: connection.execute(query, (prefix,)).fetchall())
        return dict(rows)

    def get(self, name: str) -> bytes | None:
        place, query = self.place(name), "SELECT data FROM documents WHERE name = ?"
        row = self._read(place, lambda connection: connection.execute(query, (name,)).fetchone())
        return None if row is None else bytes(row[0])

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._change(name, lambda _: data, durable=durable)

    def remove(self, name: str) -> None:
        self._change(name, lambda _: None)

    def update(self, name: str, change: Callable[[bytes | None], bytes | None]) -> bytes | None:
        return self._change(name, change)

    def generation(self, prefix: str) -> int:
        place, query = f"the changes of {prefix}", "SELECT changes FROM document_folders WHERE folder = ?"
        row = self._read(place, lambda connection: connection.execute(query, (prefix,)).fetchone())
        return 0 if row is None else int(row[0])

    def place(self, name: str) -> str:
        return f"the document {check_document_name(name)} in the database"

    def close(self) -> None:
        self._pool.close()

    def _change(
        self, name: str, change: Callable[[bytes | None], bytes | None], *, durable: bool = True
    ) -> bytes | None:
        place = self.place(name)
        # The id of the last try's transaction and the document that it has written; empty if it has written nothing.
        written = dict[str, bytes | None]()

        def run(connection: PostgresConnection) -> bytes | None:
            for transaction, after in written.items():
                # The connection broke in this transaction. It has ended, because the present transaction could get its lock.
                status = connection.execute("SELECT pg_xact_status(?::text::xid8)", (transaction,)).fetchone()
                if status is not None and status[0] == "committed":
                    return after
            written.clear()
            query = "SELECT pg_current_xact_id()::text, (SELECT data FROM documents WHERE name = ?)"
            [(transaction, before)] = connection.execute(query, (name,))
            after = change(before)
            if after != before:
                _write(connection, name, after)
                written[transaction] = after
            return after

        begin = _BEGIN_CHANGE if durable else f"{_BEGIN_CHANGE}; SET LOCAL synchronous_commit = off"
        return self._run("write", place, run, begin)

    def _read(self, place: str, run: Callable[[PostgresConnection], T]) -> T:
        return self._run("read", place, run, BEGIN)

    def _run(self, verb: str, place: str, run: Callable[[PostgresConnection], T], begin: str) -> T:
        with reported(f"PostgreSQL could not {verb} {place}"):
            return self._pool.run(run, begin)


def add_documents(connection: PostgresConnection, documents: Mapping[str, bytes]) -> list[str]:
    """Add documents in the caller's open transaction. Existing documents stay as they are. Return the names of existing documents with another content."""
    connection.run(_LOCK)
    query = "SELECT name, data FROM documents WHERE name = ANY(?)"
    present: dict[str, bytes] = dict(connection.execute(query, (list(documents),)).fetchall())
    for name, data in documents.items():
        if name not in present:
            _write(connection, check_document_name(name), data)
    return sorted(name for name, data in present.items() if data != documents[name])


def _write(connection: PostgresConnection, name: str, data: bytes | None) -> None:
    if data is None:
        connection.execute("DELETE FROM documents WHERE name = ?", (name,))
    else:
        connection.execute(_PUT, (name, data))
    folders = list(accumulate(f"{part}/" for part in name.split("/")[:-1]))
    connection.execute(_COUNT_CHANGE, (folders,))
    # Make the other gateways look for changes at once.
    connection.run("NOTIFY pilotflame")

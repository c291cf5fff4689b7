"""Stores the index of functions and revisions in tables of PostgreSQL.

Changes take a lock of the database, so each has a larger generation than all that were committed before it. Changes are rare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TypeVar

import orjson

from ....errors import GatewayError
from .postgres import BEGIN, PostgresConnection, PostgresPool, PostgresRow, reported
from .revision_index import FunctionEntry, IndexedRevision, TrafficShare

T = TypeVar("T")
_BEGIN_CHANGE = f"""{BEGIN}; SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SELECT pg_advisory_xact_lock(hashtext('pilotflame functions ' || current_schema()))"""
"""Begins a transaction whose statements see all that was committed before it got the lock, whatever the database's default isolation level."""
_ENTRIES = """SELECT name, traffic::text, paused, deleted, generation, revision, number, record, files FROM functions
LEFT JOIN revisions ON function = name AND revision = traffic -> 0 ->> 'revision'"""
_REVISIONS = (
    "SELECT function, revision, number, record, files FROM revisions WHERE function = ? ORDER BY number DESC"
)
_ADD = """INSERT INTO revisions (function, revision, number, record, files) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (function, revision) DO NOTHING"""
_PUT = """INSERT INTO functions (name, traffic, paused, deleted, generation)
SELECT ?, ?::text::jsonb, ?, ?, coalesce(max(generation), 0) + 1 FROM functions
ON CONFLICT (name) DO UPDATE SET traffic = excluded.traffic, paused = excluded.paused, deleted = excluded.deleted,
generation = excluded.generation"""
_PRUNE = """DELETE FROM revisions WHERE function = ?1 AND revision <> ALL (?2::text[])
AND number NOT IN (SELECT number FROM revisions WHERE function = ?1 ORDER BY number DESC LIMIT ?3::bigint)"""
_RESERVE = """INSERT INTO revision_numbers (function, number) VALUES (?, ?::bigint)
ON CONFLICT (function) DO UPDATE SET number = greatest(revision_numbers.number + 1, excluded.number) RETURNING number"""


class PostgresRevisionIndex:
    """A `RevisionIndex` in tables that a migration has made."""

    def __init__(self, url: str, keep: int) -> None:
        """`url` is a connection string of libpq. `keep` is how many of a function's newest revisions remain."""
        self._pool, self._keep = PostgresPool(url), keep

    def changes(self, since: int) -> list[FunctionEntry]:
        query = f"{_ENTRIES} WHERE generation > ? ORDER BY generation"
        return self._run(lambda connection: [_entry(row) for row in connection.execute(query, (since,))])

    def entry(self, name: str) -> FunctionEntry | None:
        return self._run(lambda connection: next(_read(connection, name), None))

    def change(
        self, name: str, decide: Callable[[FunctionEntry | None], FunctionEntry], new: IndexedRevision | None = None
    ) -> FunctionEntry:  # fmt: skip
        def run(connection: PostgresConnection) -> FunctionEntry:
            after = decide(next(_read(connection, name), None))
            if new is not None:
                values = (new.function, new.revision, new.number, new.record, new.files)
                connection.execute(_ADD, values)
            traffic = orjson.dumps([asdict(share) for share in after.traffic]).decode()
            connection.execute(_PUT, (name, traffic, after.paused, after.deleted))
            kept = [share.revision for share in after.traffic]
            connection.execute(_PRUNE, (name, kept, 0 if after.deleted else self._keep))
            connection.run("NOTIFY pilotflame")
            changed = next(_read(connection, name))
            if changed.live is None and not changed.deleted:
                message = f"The revision {changed.traffic[0].revision} of {name} was removed meanwhile."
                raise GatewayError(message, remedy="Choose another one: pilotflame revisions.")
            return changed

        return self._run(run, _BEGIN_CHANGE)

    def revisions(self, function: str) -> list[IndexedRevision]:
        rows = self._run(lambda connection: connection.execute(_REVISIONS, (function,)).fetchall())
        return [IndexedRevision(*row) for row in rows]

    def reserve(self, function: str, least: int) -> int:
        [(number,)] = self._run(lambda connection: connection.execute(_RESERVE, (function, least)).fetchall())
        return int(number)

    def files(self) -> list[str]:
        query = "SELECT DISTINCT files FROM revisions"
        return [name for (name,) in self._run(lambda connection: connection.execute(query).fetchall())]

    def close(self) -> None:
        self._pool.close()

    def _run(self, work: Callable[[PostgresConnection], T], begin: str = BEGIN) -> T:
        with reported("PostgreSQL could not read or write the functions"):
            return self._pool.run(work, begin)


def _read(connection: PostgresConnection, name: str) -> Iterator[FunctionEntry]:
    return map(_entry, connection.execute(f"{_ENTRIES} WHERE name = ?", (name,)))


def _entry(row: PostgresRow) -> FunctionEntry:
    name, traffic, paused, deleted, generation, *revision = row
    # Take only known members: a newer gateway may have stored more about a share.
    shares = tuple(TrafficShare(one["revision"], one["weight"], one["tag"]) for one in orjson.loads(traffic))
    live = None if revision[0] is None else IndexedRevision(name, *revision)
    return FunctionEntry(name, shares, paused, deleted, generation, live)

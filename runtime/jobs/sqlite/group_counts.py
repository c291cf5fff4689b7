"""Runs changes of several callers, and writes the counters that they change once.

Each change runs its own statements on the tables of jobs. The counters, which all changes of a function need, are read once and written
once. A change has no savepoint: if it fails after it has changed something, the whole group is undone, and each change is run by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ....errors import PilotflameError
from ...ground.access.keys import ALL
from ..sql import rows
from ..sql.counting_transaction import CountingTransaction
from ..sql.store import JobChange
from ..sql.transaction import Transaction
from .database import SqliteConnection

_COLUMNS = tuple(rows.COUNTS.split(", "))
_SET = ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS)
_WRITE_COUNTERS = (
    f"INSERT INTO counters (function, owner, {rows.COUNTS}) VALUES ({', '.join('?' * (2 + len(_COLUMNS)))}) "  # noqa: S608
    f"ON CONFLICT (function, owner) DO UPDATE SET {_SET}"
)
_WRITE_STORED = "INSERT INTO stored VALUES (?, ?) ON CONFLICT (owner) DO UPDATE SET bytes = excluded.bytes"
_UNUSED = "DELETE FROM stored WHERE owner <> ? AND owner = ? AND bytes <= 0"


def run_together(
    connection: SqliteConnection, changes: Sequence[JobChange[Any]]
) -> list[tuple[Transaction, Any] | PilotflameError]:
    """Run changes of several callers (see `RunTogether`). Raise an error if the changes must be run one by one."""
    counts = GroupCounts(connection)
    results = [_run(connection, change, counts) for change in changes]
    counts.write()
    return results


def _run(
    connection: SqliteConnection, change: JobChange[Any], counts: GroupCounts
) -> tuple[Transaction, Any] | PilotflameError:
    before = connection.total_changes, counts.changes
    try:
        return change(connection, counts.transaction)
    except PilotflameError as error:
        if (connection.total_changes, counts.changes) != before:
            raise
        return error


class GroupCounts:
    """The counters of functions and the stored bytes. All changes of a group read and change them here."""

    def __init__(self, connection: SqliteConnection) -> None:
        self._connection = connection
        self._counters: dict[tuple[str, str], dict[str, int]] = {}
        self._stored: dict[str, int] = {}
        # The keys of `_counters` and of `_stored` that have changed.
        self._counted, self._added = set[tuple[str, str]](), set[str]()
        self.changes = 0
        """The number of calls of `count` and `add_bytes`."""

    def transaction(self, *args: Any, **more: Any) -> Transaction:
        return CountingTransaction(self, *args, **more)

    def of(self, function: str, owner: str) -> dict[str, int]:
        """Return the row of `counters` for a function and an owner, by column."""
        if (found := self._counters.get((function, owner))) is None:
            found = asdict(rows.counts(self._connection, function, owner))
            self._counters[function, owner] = found
        return found

    def bytes_of(self, owner: str) -> int:
        if (found := self._stored.get(owner)) is None:
            found = self._stored[owner] = rows.stored_bytes(self._connection, owner).get(owner, 0)
        return found

    def count(self, function: str, owner: str, added: Mapping[str, int]) -> None:
        """Add to the counters of all jobs of a function, and to the counters of the owner's jobs of this function."""
        self.changes += 1
        for one in (ALL, owner) if owner else (ALL,):
            counters = self.of(function, one)
            for name, number in added.items():
                counters[name] += number
            self._counted.add((function, one))

    def add_bytes(self, owner: str, added: int) -> None:
        self.changes += 1
        self._stored[owner] = self.bytes_of(owner) + added
        self._added.add(owner)

    def write(self) -> None:
        """Write the counters and the stored bytes that have changed."""
        counted = [(*key, *map(self._counters[key].__getitem__, _COLUMNS)) for key in self._counted]
        self._connection.executemany(_WRITE_COUNTERS, counted)
        self._connection.executemany(_WRITE_STORED, [(owner, self._stored[owner]) for owner in self._added])
        self._connection.executemany(
            _UNUSED, [(ALL, owner) for owner in self._added if self._stored[owner] <= 0]
        )

"""Opens the jobs database of one gateway, an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ....errors import JobStoreFailed
from ...ground.settings.state_dir import create_private, store_fault
from ..sql.group_commit import GroupCommit

BUSY_TIMEOUT_S = 10.0
WAL_PAGES = 4000
"""When the write-ahead log (WAL) has this many pages (16 MB), SQLite copies it into the file."""
_SETTINGS = (
    # This setting has an effect only before the first table exists and before the WAL is enabled.
    "auto_vacuum=INCREMENTAL",
    "journal_mode=WAL",
    # A commit returns only once it is durably on disk.
    "synchronous=FULL",
    "temp_store=MEMORY",
    "cache_size=-32768",
    f"wal_autocheckpoint={WAL_PAGES}",
    f"journal_size_limit={2 * WAL_PAGES * 4096}",
)


class SqliteConnection(sqlite3.Connection):
    """A connection that returns the number of a new row of `jobs`."""

    def insert(self, sql: str, values: Sequence[Any], /) -> int | None:
        added = self.execute(sql, values)
        return added.lastrowid if added.rowcount else None


class Database(GroupCommit):
    """The database file. `scripts[n]` upgrades the file from version n to n + 1."""

    errors = (sqlite3.Error,)
    remedy = "Check whether the disk of the state folder is full or the file is damaged."

    def __init__(
        self, path: Path, scripts: Sequence[str], on_written: Callable[[bool], None] = lambda _failed: None
    ) -> None:
        super().__init__(on_written)
        self.path = path
        self._scripts = scripts

    def open(self) -> None:
        create_private(self.path)
        with ExitStack() as opened:
            try:
                opened.callback((writer := self.connect(reading=False)).close)
                self._upgrade(writer)
                opened.callback((reader := self.connect(reading=True)).close)
            except sqlite3.Error as error:
                fault, remedy = store_fault(self.path, error)
                raise JobStoreFailed(
                    f"The store of jobs, {self.path}, cannot be used: {fault}.", remedy=remedy
                ) from error
            # From here on, each thread closes its own connection, so the ExitStack must not close it.
            opened.pop_all()
        self._begin(writer, [reader])

    def connect(self, *, reading: bool) -> SqliteConnection:
        connection = sqlite3.connect(
            self.path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            factory=SqliteConnection,
        )
        connection.row_factory = sqlite3.Row
        try:
            for setting in (*_SETTINGS, "query_only=ON") if reading else _SETTINGS:
                connection.execute(f"PRAGMA {setting}")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def begin(self, connection: sqlite3.Connection, *, reading: bool) -> None:
        connection.execute("BEGIN" if reading else "BEGIN IMMEDIATE")

    def in_transaction(self, connection: sqlite3.Connection) -> bool:
        return connection.in_transaction

    def broken(self, connection: sqlite3.Connection) -> bool:
        """Return False, because there is no server whose connection could break."""
        return False

    def _upgrade(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        # Versions that no release has written have an empty script. Files of these versions cannot be upgraded.
        first = 1 + sum(not script for script in self._scripts)
        if 0 < version < first:
            fault = f"{self.path} has version {version}; this pilotflame reads versions from {first} on."
            raise JobStoreFailed(
                fault, remedy="Move it away, and start again: a new file begins without jobs."
            )
        for number, script in enumerate(self._scripts[version:], version + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version={number}; COMMIT;")
        if version > len(self._scripts):
            raise JobStoreFailed(
                f"{self.path} has version {version}; this pilotflame knows versions up to {len(self._scripts)}.",
                remedy="Use the pilotflame that wrote it, or a newer one.",
            )

"""Stores the usage of functions in an SQLite file: sums for each hour and each day, and the footprint of each function.

The sums of an hour are kept for 14 days, and the sums of a day for 400 days, even if the function was deleted. All
methods block, and may be called in several threads.
"""

from __future__ import annotations

import enum
import logging
import math
import operator
import os
import secrets
import sqlite3
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from ....errors import GatewayError
from ..settings.state_dir import create_private, store_fault
from .usage import DAY_S, FIGURES, HOUR_S, Footprint, Usage, figures

LOG = logging.getLogger(__name__)
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
HOURS_KEPT_S, DAYS_KEPT_S = 14 * DAY_S, 400 * DAY_S
BUSY_TIMEOUT_S = 10.0
_SUMS = ", ".join(f"SUM({name})" for name in FIGURES)


class UsageKey(enum.StrEnum):
    """The key by which a query sums up usage."""

    FUNCTION = "function"
    OWNER = "owner"
    DAY = "day"
    HOUR = "hour"

    def of(self, function: str, owner: str, at: float) -> str | int:
        """Return the key of the usage of this function and owner at this Unix time."""
        spans = {UsageKey.DAY: DAY_S, UsageKey.HOUR: HOUR_S}
        if (span_s := spans.get(self)) is not None:
            return math.floor(at / span_s) * span_s
        return function if self is UsageKey.FUNCTION else owner


_KEYS = {
    UsageKey.FUNCTION: "function",
    UsageKey.OWNER: "owner",
    UsageKey.DAY: f"start - start % {DAY_S}",
    UsageKey.HOUR: "start",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Further stored figures of a function: its footprint, and the part of a day's usage that its budget forgives."""

    day: int = 0
    money: float = 0.0
    seconds: float = 0.0
    worker_gb: float = 0.0
    rest_gb: float = 0.0
    disk_gb: float = 0.0
    devices: float = 0.0
    beside_gb: float = 0.0

    @property
    def footprint(self) -> Footprint:
        return Footprint(self.worker_gb, self.rest_gb, self.disk_gb, self.devices, self.beside_gb)


_NAMES = [field.name for field in fields(Standing)]
_STANDING, _MARKS = ", ".join(_NAMES), f"?{', ?' * len(_NAMES)}"
_standing = operator.attrgetter(*_NAMES)


class UsageRecord(NamedTuple):
    """The usage of one function since the last write."""

    function: str
    owner: str
    usage: Usage
    standing: Standing


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Names the usage that a caller wants. `since` and `until` are Unix times. If `functions` is None, the usage of all
    functions is wanted.
    """

    by: UsageKey
    since: float
    until: float
    functions: Collection[str] | None = None


class UsageStore:
    """The SQLite file of the usage. Call `open` first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """Open or create the file. Move a damaged file aside. Raise GatewayError if the file cannot be used."""
        if self._path.is_file() and (damage := self._damage()):
            aside = f"{self._path}.damaged-{secrets.token_hex(4)}"
            for suffix in ("", "-wal", "-shm"):
                with suppress(FileNotFoundError):
                    os.rename(f"{self._path}{suffix}", f"{aside}{suffix}")  # noqa: PTH104
            LOG.warning(
                "the usage before now is lost: %s was damaged (%s), and is now %s", self._path, damage, aside
            )
        create_private(self._path)
        with self._errors():
            connection = sqlite3.connect(
                self._path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._connection = connection
            for setting in ("auto_vacuum=INCREMENTAL", "journal_mode=WAL", "synchronous=NORMAL"):
                connection.execute(f"PRAGMA {setting}")
            for table in ("hours", "days"):
                connection.execute(
                    f"CREATE TABLE IF NOT EXISTS {table} (start INTEGER, function TEXT, owner TEXT,"
                    " PRIMARY KEY (start, function, owner)) WITHOUT ROWID"
                )
                _add_columns(connection, table, FIGURES)
            connection.execute("CREATE TABLE IF NOT EXISTS standings (function TEXT PRIMARY KEY)")
            _add_columns(connection, "standings", _NAMES)

    def _damage(self) -> str:
        """Return what is wrong with the content of the file; "" if nothing is, or if it cannot be opened."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)) as connection:
                (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                return "" if found == "ok" else str(found)
        except sqlite3.DatabaseError as error:
            return str(error) if error.sqlite_errorcode in DAMAGED else ""

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def add(self, at: float, records: Iterable[UsageRecord]) -> None:
        """Add usage to the sums of the hour and the day of `at`. A crash of the gateway cannot lose it, but a loss of power can. Raise
        GatewayError.
        """
        with self._transaction() as connection:
            for table, span_s in (("hours", HOUR_S), ("days", DAY_S)):
                start = math.floor(at / span_s) * span_s
                connection.executemany(
                    _upsert(table),
                    ((start, one.function, one.owner, *figures(one.usage)) for one in records),
                )
            replace = f"INSERT OR REPLACE INTO standings (function, {_STANDING}) VALUES ({_MARKS})"  # noqa: S608
            connection.executemany(
                replace,
                ((one.function, *_standing(one.standing)) for one in records),
            )

    def forget_old(self, at: float) -> None:
        """Remove the hours and days that are not kept any longer. Raise GatewayError if the store cannot be used."""
        with self._transaction() as connection:
            for table, kept_s in (("hours", HOURS_KEPT_S), ("days", DAYS_KEPT_S)):
                old = f"DELETE FROM {table} WHERE start < ?"  # noqa: S608
                connection.execute(old, (at - kept_s,))
            connection.execute("DELETE FROM standings WHERE function NOT IN (SELECT function FROM days)")
        with self._using() as connection:
            connection.execute("PRAGMA incremental_vacuum").fetchall()

    def knows(self, function: str) -> bool:
        """Return True if any figures of a function are stored. Raise GatewayError if the store cannot be used."""
        with self._using() as connection:
            found = connection.execute("SELECT 1 FROM standings WHERE function = ?", (function,)).fetchone()
        return found is not None

    def today(self, at: float) -> dict[str, tuple[Usage, Standing]]:
        """Return, for each function with stored figures, its usage on the day of `at` and its Standing."""
        day = math.floor(at / DAY_S) * DAY_S
        query = UsageQuery(UsageKey.FUNCTION, day, day + 1)
        used = {str(name): usage for name, usage in self._sums("days", query)}
        with self._using() as connection:
            select = f"SELECT function, {_STANDING} FROM standings"  # noqa: S608
            rows = connection.execute(select).fetchall()
        return {function: (used.get(function, Usage()), Standing(*rest)) for function, *rest in rows}

    def read(self, query: UsageQuery, at: float) -> list[tuple[str | int, Usage]]:
        """Return the usage that `query` names, as sums by key. Times are rounded down to hours or, if `since` is too long ago, to days of UTC."""
        hours = query.by is UsageKey.HOUR or query.since >= at - HOURS_KEPT_S
        span_s = HOUR_S if hours else DAY_S
        since = math.floor(query.since / span_s) * span_s
        rounded = UsageQuery(query.by, since, query.until, query.functions)
        return self._sums("hours" if hours else "days", rounded)

    def _sums(self, table: str, query: UsageQuery) -> list[tuple[str | int, Usage]]:
        where, values = "start >= ? AND start < ?", [query.since, query.until]
        names = [] if query.functions is None else sorted(query.functions)
        if query.functions is not None:
            where += f" AND function IN ({', '.join('?' * len(names))})"
        # No text of a caller is part of the statement: `_KEYS` and `_SUMS` are constants.
        select = f"SELECT {_KEYS[query.by]} AS key, {_SUMS} FROM {table}"  # noqa: S608
        statement = f"{select} WHERE {where} GROUP BY key ORDER BY key"
        with self._using() as connection:
            rows = connection.execute(statement, (*values, *names)).fetchall()
        return [(key, Usage(*sums)) for key, *sums in rows]

    @contextmanager
    def _using(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            if self._connection is None:
                raise GatewayError(
                    "The store of usage is closed.", remedy="Try again when the gateway is up."
                )
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._using() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            fault, remedy = store_fault(self._path, error)
            raise GatewayError(
                f"The store of usage, {self._path}, cannot be used: {fault}.", remedy=remedy
            ) from error


def _add_columns(connection: sqlite3.Connection, table: str, names: Iterable[str]) -> None:
    """Add the columns that are missing, because an earlier release with fewer figures may have made the table."""
    there = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    for name in names:
        if name not in there:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} REAL NOT NULL DEFAULT 0")


def _upsert(table: str) -> str:
    columns = ", ".join(FIGURES)
    added = ", ".join(f"{name} = {name} + excluded.{name}" for name in FIGURES)
    marks = f"?, ?, ?{', ?' * len(FIGURES)}"
    insert = f"INSERT INTO {table} (start, function, owner, {columns}) VALUES ({marks})"  # noqa: S608
    return f"{insert} ON CONFLICT DO UPDATE SET {added}"

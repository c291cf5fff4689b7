"""Connects to PostgreSQL, and lets code that was written for `sqlite3` use the connection.

Statements have SQLite's placeholders: each `?` stands for the next value, and `?2` for the second one. Rows are read by name and by
position.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

CONNECT_TIMEOUT_S = 10
STATEMENT_TIMEOUT_S = 30
IDLE_TIMEOUT_S = 5
"""The server ends the session of a gateway that stands still for this long in a transaction, so that no other gateway waits for its locks
for longer.
"""
BEGIN = f"""BEGIN; SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT_S}s';
SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S}s'"""
"""Begins a transaction with limits. They are not the session's, since a PgBouncer may share sessions."""
_KEEPALIVE = {
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
_MARK = re.compile(r"\?(\d*)")


class PostgresRow(tuple[Any, ...]):
    """A row whose columns have names."""

    __slots__ = ()
    positions: ClassVar[Mapping[str, int]]

    def __getitem__(self, key: Any) -> Any:
        return tuple.__getitem__(self, self.positions[key] if isinstance(key, str) else key)

    def keys(self) -> Iterable[str]:
        return self.positions.keys()


class PostgresCursor:
    """The rows that a statement returns."""

    def __init__(self, cursor: psycopg.RawCursor[PostgresRow]) -> None:
        self._cursor = cursor
        self.rowcount = cursor.rowcount

    def fetchone(self) -> PostgresRow | None:
        return self._cursor.fetchone()

    def fetchall(self) -> list[PostgresRow]:
        return self._cursor.fetchall()

    def __iter__(self) -> Iterator[PostgresRow]:
        return iter(self._cursor)

    def close(self) -> None:
        self._cursor.close()


class PostgresConnection:
    """A connection with the methods of sqlite3's that stores call. It begins no transaction by itself."""

    def __init__(self, url: str) -> None:
        """Connect. Blocks, for at most CONNECT_TIMEOUT_S. Raises psycopg.Error."""
        limits: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, **_KEEPALIVE}
        info = make_conninfo(**limits | conninfo_to_dict(url))
        self.session: psycopg.Connection[PostgresRow] = psycopg.connect(
            info, autocommit=True, row_factory=_rows
        )

    @property
    def broken(self) -> bool:
        return self.session.closed

    @property
    def in_transaction(self) -> bool:
        return self.session.info.transaction_status is not psycopg.pq.TransactionStatus.IDLE

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> PostgresCursor:
        cursor: psycopg.RawCursor[PostgresRow] = psycopg.RawCursor(self.session, row_factory=_rows)
        cursor.execute(_numbered(sql), values, binary=True)
        return PostgresCursor(cursor)

    def executemany(self, sql: str, values: Iterable[Sequence[Any]], /) -> None:
        psycopg.RawCursor(self.session).executemany(_numbered(sql), values)

    def run(self, script: str) -> list[PostgresRow]:
        """Run statements without values in one round trip. Return the rows of the last one."""
        cursor = self.session.cursor()
        cursor.execute(script)
        while cursor.nextset():
            pass
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        self.session.close()


@lru_cache(1024)
def _numbered(sql: str) -> str:
    """Return the statement with PostgreSQL's placeholders."""
    used = 0

    def number(found: re.Match[str]) -> str:
        nonlocal used
        used += 1
        return f"${found[1] or used}"

    return _MARK.sub(number, sql)


@lru_cache(256)
def _row_class(*names: str) -> type[PostgresRow]:
    return type(
        "NamedRow",
        (PostgresRow,),
        {"__slots__": (), "positions": {name: at for at, name in enumerate(names)}},
    )


def _rows(cursor: Any) -> type[PostgresRow]:
    """Make rows: a psycopg row factory."""
    return _row_class(*(column.name for column in cursor.description or ()))

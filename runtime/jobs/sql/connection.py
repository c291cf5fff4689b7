"""Defines `SqlConnection`: the methods of a connection to a database that this package calls, named as in sqlite3."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

SqlRow: TypeAlias = Any
"""A row: `row["name"]` and `row[0]` are columns, `dict(row)` has all, and iteration gives the values."""


class SqlCursor(Protocol):
    """The rows that a statement returns."""

    @property
    def rowcount(self) -> int:
        """The number of rows that the statement has changed."""

    def fetchone(self) -> SqlRow: ...

    def fetchall(self) -> list[SqlRow]: ...

    def __iter__(self) -> Iterator[SqlRow]: ...

    def close(self) -> None: ...


class SqlConnection(Protocol):
    """A connection. Each `?` in a statement stands for the next value."""

    def execute(self, sql: str, values: Sequence[Any] = ..., /) -> SqlCursor: ...

    def insert(self, sql: str, values: Sequence[Any], /) -> int | None:
        """Run an INSERT of a row of `jobs` that ends with ON CONFLICT DO NOTHING. Return the row's number, or None if there is a row
        with the same key.
        """

    def executemany(self, sql: str, values: Iterable[Sequence[Any]], /) -> object: ...

    def close(self) -> None: ...

"""Defines `Connection`: the methods of a connection to a database that this room calls. `sqlite3.Connection` has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeAlias

Row: TypeAlias = Any
"""A row: `row["name"]` and `row[0]` are columns, `dict(row)` has all, and iteration gives the values."""


class Cursor(Protocol):
    """The rows that a statement returns."""

    @property
    def rowcount(self) -> int:
        """The number of rows that the statement has changed."""

    @property
    def lastrowid(self) -> int | None:
        """The number of the row that the statement has added to `jobs`."""

    def fetchone(self) -> Row: ...

    def fetchall(self) -> list[Row]: ...

    def __iter__(self) -> Iterator[Row]: ...

    def close(self) -> None: ...


class Connection(Protocol):
    """A connection. Each `?` in a statement stands for the next value."""

    def execute(self, sql: str, values: Sequence[Any] = ..., /) -> Cursor: ...

    def executemany(self, sql: str, values: Iterable[Sequence[Any]], /) -> object: ...

    def close(self) -> None: ...

"""Reads all rows of a store of jobs, table by table, so that another store can add them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from .connection import SqlConnection

# If the other store has no column for the number of a row, it numbers the rows in this order. In the four tables with
# the number of a job, this number must be the first column.
_QUERIES = {
    "jobs": "SELECT * FROM jobs ORDER BY number",
    "inputs": "SELECT * FROM inputs ORDER BY number",
    "results": "SELECT * FROM results ORDER BY number",
    "pieces": "SELECT * FROM pieces ORDER BY job, number",
    "tombstones": "SELECT key, until_s, owner FROM tombstones ORDER BY number",
    "deliveries": "SELECT * FROM deliveries ORDER BY rowid",
    "alerts": "SELECT * FROM alerts",
    "counters": "SELECT * FROM counters",
    "stored": "SELECT * FROM stored",
}


class Table(NamedTuple):
    """A table that is not empty."""

    name: str
    columns: tuple[str, ...]
    rows: Iterator[Sequence[Any]]


def row_counts(connection: SqlConnection) -> dict[str, int]:
    """Return how many rows each table has."""
    return {name: connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in _QUERIES}  # noqa: S608


def read_tables(connection: SqlConnection) -> Iterator[Table]:
    for name, query in _QUERIES.items():
        rows = iter(connection.execute(query))
        if (first := next(rows, None)) is not None:
            yield Table(name, tuple(first.keys()), chain((first,), rows))

"""Adds all rows of another store of jobs, in one transaction.

Other gateways can write meanwhile. Only the reservation of numbers and the last statements, which change counters, have
the lock for writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from importlib.resources import files

from ...ground.storing.postgres import PostgresConnection
from ...ground.storing.postgres_blobs import PART_BYTES
from ..sql.tables import Table
from .database import LOCK, PostgresDatabase

STEP = 1000
"""`copied` is called each time that this many rows were copied."""
# The session may be idle for up to 60 s, while rows of the other store are read. The commit is durable, whatever the
# default of the database is.
_BEGIN = """BEGIN; SET TRANSACTION ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0;
SET LOCAL idle_in_transaction_session_timeout = '60s'; SET LOCAL synchronous_commit = on"""
_RESERVE, _ADD_COUNTERS, _ADD_STORED = (
    (files(__package__) / f"{name}.sql").read_text(encoding="utf-8")
    for name in ("reserve_numbers", "add_counters", "add_stored")
)
_ADDED = {"counters": _ADD_COUNTERS, "stored": _ADD_STORED}
"""For tables whose values are added to existing rows: the statements that add them."""
_NUMBERED = ("jobs", "inputs", "results", "pieces")
"""Tables whose first column is the number of a job."""


def copy_rows(
    database: PostgresDatabase, tables: Iterable[Table], bodies: Iterable[tuple[str, bytes]], last: int,
    at_end: Callable[[PostgresConnection], object], copied: Callable[[int], object],
) -> None:  # fmt: skip
    """Add rows and large bodies. Raise psycopg.Error, also if there is a job with the same id. Then nothing is added.
    This blocks.

    The jobs keep their order, and get numbers that are larger than all numbers in the database. `last` is the largest
    of their old numbers. `at_end` is called before the commit, and may write more. `copied` is called with the number
    of rows since its last call.
    """
    with closing(database.connect(reading=False)) as connection:
        database.begin(connection, reading=False)
        [(before,)] = connection.execute(_RESERVE, (last,))
        connection.run(f"COMMIT; {_BEGIN}")
        added = []
        for table in tables:
            if table.name in _ADDED:
                added.append((_ADDED[table.name], [tuple(row) for row in table.rows]))
            else:
                _copy(connection, table, before if table.name in _NUMBERED else 0, copied)
        _copy(connection, Table("blobs", ("name", "part", "bytes"), _parts(bodies)), 0, copied)
        connection.run(LOCK)
        for add, rows in added:
            connection.executemany(add, rows)
        at_end(connection)
        connection.run("COMMIT")


def _copy(connection: PostgresConnection, table: Table, more: int, copied: Callable[[int], object]) -> None:
    """Copy rows, and add `more` to the first column."""
    columns = ", ".join(table.columns)
    with (
        connection.session.cursor() as cursor,
        cursor.copy(f"COPY {table.name} ({columns}) FROM STDIN".encode()) as copy,
    ):
        number = 0
        for number, row in enumerate(table.rows, 1):
            copy.write_row((row[0] + more, *row[1:]) if more else row)
            if number % STEP == 0:
                copied(STEP)
        copied(number % STEP)


def _parts(bodies: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, int, bytes]]:
    for name, body in bodies:
        for start in range(0, len(body), PART_BYTES):
            yield name, start, body[start : start + PART_BYTES]

"""Queries on jobs, which `SqlJobStore` runs in a reader thread. `job_store.py` says what they return.

Each query uses an index, and sees one state of the database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import closing

from ....errors import JobExpired
from ...ground.access.keys import ALL
from ..stored.job import Job, JobCounts, JobState
from ..stored.job_store import unknown_job
from .connection import SqlConnection, SqlRow
from .rows import COUNTS, SELECT_WHOLE, find_row, find_rows, job_of
from .transaction import missing, row_of

_NEWEST = "WHERE function = ? AND %s state = ? AND jobs.number < ? ORDER BY jobs.number DESC LIMIT ?"
_NEXT = "WHERE function = ? AND %s state = ? AND jobs.number > ? ORDER BY jobs.number LIMIT ?"
OWNED = "owner <> '' AND owner = ? AND"
"""The condition on an owner. Without its first part, SQLite would not use the indexes of owners."""
_MAX_NUMBER = 1 << 62
PIECES_BYTES = 4 << 20
"""`pieces` adds no more pieces to its result when the result has reached this size."""


def get(connection: SqlConnection, function: str, job_id: str, owner: str = ALL) -> Job:
    return job_of(row_of(connection, function, job_id, owner, SELECT_WHOLE))


def glance(connection: SqlConnection, function: str, job_id: str, owner: str = ALL) -> Job:
    return job_of(row_of(connection, function, job_id, owner))


def glance_any(connection: SqlConnection, job_id: str) -> Job:
    if (row := find_row(connection, job_id)) is None:
        raise unknown_job(job_id)
    return job_of(row)


def glances(connection: SqlConnection, job_ids: Collection[str]) -> list[Job]:
    marks = ", ".join("?" * len(job_ids))
    return (
        [job_of(row) for row in find_rows(connection, f"WHERE id IN ({marks})", *job_ids)] if job_ids else []
    )


def find(
    connection: SqlConnection,
    job_id: str,
    allows: Callable[[str], bool],
    among: Collection[str],
    owner: str = ALL,
) -> Job:
    row = find_row(connection, job_id, SELECT_WHOLE)
    if row is not None and allows(row["function"]) and owner in (ALL, row["owner"]):
        return job_of(row)
    for function in among if row is None else ():
        if isinstance(why := missing(connection, function, job_id, owner), JobExpired):
            raise why
    raise unknown_job(job_id)


def next_due(connection: SqlConnection, function: str, after_s: float = 0.0) -> float | None:
    delayed = "function = ? AND state = 'IN_QUEUE' AND due_s > 0 AND due_s > ?"
    query = f"SELECT min(due_s) FROM jobs WHERE {delayed}"  # noqa: S608
    due_s: float | None = connection.execute(query, (function, after_s)).fetchone()[0]
    return due_s


def newest(
    connection: SqlConnection,
    function: str,
    states: Collection[JobState] = (),
    limit: int = 100,
    before_id: str = "",
    owner: str = ALL,
) -> list[Job]:
    before = row_of(connection, function, before_id, owner)["number"] if before_id else _MAX_NUMBER
    return _newest(connection, [function], states, before, limit, owner)


def latest(
    connection: SqlConnection,
    functions: Collection[str],
    limit: int,
    before_id: str = "",
    owner: str = ALL,
) -> list[Job]:
    before = _MAX_NUMBER
    if before_id:
        row = find_row(connection, before_id)
        if row is None or row["function"] not in functions or owner not in (ALL, row["owner"]):
            raise unknown_job(before_id)
        before = row["number"]
    return _newest(connection, functions, (), before, limit, owner)


def newer_ids(
    connection: SqlConnection, functions: Collection[str], limit: int, than_id: str, owner: str = ALL
) -> list[str]:
    row = find_row(connection, than_id)
    if row is None:
        return []
    rows: list[SqlRow] = []
    for function in functions:
        owned, values = ("", (function,)) if owner == ALL else (OWNED, (function, owner))
        for state in JobState:
            rows += find_rows(connection, _NEXT % owned, *values, state.value, row["number"], limit)
    rows.sort(key=lambda row: int(row["number"]))
    return [row["id"] for row in rows[:limit]]


def _newest(
    connection: SqlConnection, functions: Collection[str], states: Collection[JobState], before: int,
    limit: int, owner: str,
) -> list[Job]:  # fmt: skip
    # One query per state, because the index is ordered by number only within a state.
    rows: list[SqlRow] = []
    for function in functions:
        owned, values = ("", (function,)) if owner == ALL else (OWNED, (function, owner))
        for state in set(states) or set(JobState):
            rows += find_rows(connection, _NEWEST % owned, *values, state.value, before, limit)
    rows.sort(key=lambda row: -int(row["number"]))
    return [job_of(row) for row in rows[:limit]]


def pieces(connection: SqlConnection, job_id: str, after: int, limit: int = 1000) -> list[tuple[int, bytes]]:
    """Return up to `limit` pieces, and none after the piece with which the list reaches PIECES_BYTES."""
    cursor = connection.execute(
        "SELECT pieces.number, body FROM jobs JOIN pieces ON pieces.job = jobs.number "
        "WHERE id = ? AND pieces.number > ? ORDER BY pieces.number LIMIT ?",
        (job_id, after, limit),
    )
    found: list[tuple[int, bytes]] = []
    size_bytes = 0
    with closing(cursor):
        while size_bytes < PIECES_BYTES and (row := cursor.fetchone()) is not None:
            found.append((row["number"], row["body"]))
            size_bytes += len(row["body"])
    return found


def all_counts(connection: SqlConnection) -> dict[str, JobCounts]:
    rows = connection.execute(f"SELECT function, {COUNTS} FROM counters WHERE owner = ?", (ALL,))  # noqa: S608
    return {function: JobCounts(*numbers) for function, *numbers in rows}


def functions_waiting(connection: SqlConnection) -> list[str]:
    return sorted(function for function, counts in all_counts(connection).items() if counts.in_queue)


def last_number(connection: SqlConnection) -> int:
    """Return the row number (`jobs.number`) of the newest job; 0 if there is no job."""
    (number,) = connection.execute("SELECT max(number) FROM jobs").fetchone()
    return number or 0


def begun_alerts(connection: SqlConnection) -> list[tuple[str, str]]:
    rows = connection.execute("SELECT function, condition FROM alerts")
    return [(row["function"], row["condition"]) for row in rows]

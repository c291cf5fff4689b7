"""Queries on jobs, which `JobStore` runs in the reader thread.

Each query uses an index, and sees one state of the file.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing

from ....errors import JobExpired, UnknownJob
from ...ground.access.keys import ALL
from .job import Job, JobCounts, JobState
from .schema import SELECT_WHOLE, find_row, find_rows, job_of
from .transaction import missing, row_of

_NEWEST = "WHERE function = ? AND %s state = ? AND jobs.number < ? ORDER BY jobs.number DESC LIMIT ?"
_NEXT = "WHERE function = ? AND %s state = ? AND jobs.number > ? ORDER BY jobs.number LIMIT ?"
OWNED = "owner <> '' AND owner = ? AND"
"""The condition on an owner. Without its first part, SQLite would not use the indexes of owners."""
_MAX_NUMBER = 1 << 62
_COUNTS = "in_queue, in_progress, completed, failed, cancelled, retried, queued_bytes"
PIECES_BYTES = 4 << 20
"""`pieces` adds no more pieces to its result when the result has reached this size."""


def get(connection: sqlite3.Connection, function: str, job_id: str, owner: str = ALL) -> Job:
    """Return an owner's job with its input and result. Raise JobExpired or UnknownJob if there is none."""
    return job_of(row_of(connection, function, job_id, owner, SELECT_WHOLE))


def glance(connection: sqlite3.Connection, function: str, job_id: str, owner: str = ALL) -> Job:
    """Return what `get` returns, without input, output and logs."""
    return job_of(row_of(connection, function, job_id, owner))


def glance_any(connection: sqlite3.Connection, job_id: str) -> Job:
    """Return the job with this id, of any owner, without input, output and logs. Raise UnknownJob if there is none."""
    if (row := find_row(connection, job_id)) is None:
        raise unknown(job_id)
    return job_of(row)


def find(
    connection: sqlite3.Connection,
    job_id: str,
    allows: Callable[[str], bool],
    among: Collection[str],
    owner: str = ALL,
) -> Job:
    """Return the owner's job with this id if `allows(function)` is true for its function.

    Raises JobExpired if it was deleted and belonged to a function in `among`, else UnknownJob.
    """
    row = find_row(connection, job_id, SELECT_WHOLE)
    if row is not None and allows(row["function"]) and owner in (ALL, row["owner"]):
        return job_of(row)
    for function in among if row is None else ():
        if isinstance(why := missing(connection, function, job_id, owner), JobExpired):
            raise why
    raise unknown(job_id)


def unknown(job_id: str) -> UnknownJob:
    """Return the same error for unknown jobs and for jobs of other callers: it must not reveal which ids exist."""
    return UnknownJob(
        f"There is no job {job_id[:128]!r}.", remedy="Check the id, and which functions the API key covers."
    )


def next_due(connection: sqlite3.Connection, function: str, after_s: float = 0.0) -> float | None:
    """Return the earliest time after `after_s` at which a delayed job may start, or None."""
    delayed = "function = ? AND state = 'IN_QUEUE' AND due_s > 0 AND due_s > ?"
    query = f"SELECT min(due_s) FROM jobs WHERE {delayed}"  # noqa: S608
    due_s: float | None = connection.execute(query, (function, after_s)).fetchone()[0]
    return due_s


def newest(
    connection: sqlite3.Connection,
    function: str,
    states: Collection[JobState] = (),
    limit: int = 100,
    before_id: str = "",
    owner: str = ALL,
) -> list[Job]:
    """Return up to `limit` of the owner's jobs in these states (default: all), without input, output and logs.

    The newest job comes first. With `before_id`, return only jobs that are older than that job.
    """
    before = row_of(connection, function, before_id, owner)["number"] if before_id else _MAX_NUMBER
    return _newest(connection, [function], states, before, limit, owner)


def latest(
    connection: sqlite3.Connection,
    functions: Collection[str],
    limit: int,
    before_id: str = "",
    owner: str = ALL,
) -> list[Job]:
    """Return up to `limit` of the owner's jobs of these functions, the newest first, without input, output and logs."""
    before = _MAX_NUMBER
    if before_id:
        row = find_row(connection, before_id)
        if row is None or row["function"] not in functions or owner not in (ALL, row["owner"]):
            raise unknown(before_id)
        before = row["number"]
    return _newest(connection, functions, (), before, limit, owner)


def newer_ids(
    connection: sqlite3.Connection, functions: Collection[str], limit: int, than_id: str, owner: str = ALL
) -> list[str]:
    """Return the ids of the owner's jobs of these functions that are newer than `than_id`: the `limit` oldest, oldest
    first.
    """
    row = find_row(connection, than_id)
    if row is None:
        return []
    rows: list[sqlite3.Row] = []
    for function in functions:
        owned, values = ("", (function,)) if owner == ALL else (OWNED, (function, owner))
        for state in JobState:
            rows += find_rows(connection, _NEXT % owned, *values, state.value, row["number"], limit)
    rows.sort(key=lambda row: int(row["number"]))
    return [row["id"] for row in rows[:limit]]


def _newest(
    connection: sqlite3.Connection, functions: Collection[str], states: Collection[JobState], before: int,
    limit: int, owner: str,
) -> list[Job]:  # fmt: skip
    # One query per state, because the index is ordered by number only within a state.
    rows: list[sqlite3.Row] = []
    for function in functions:
        owned, values = ("", (function,)) if owner == ALL else (OWNED, (function, owner))
        for state in set(states) or set(JobState):
            rows += find_rows(connection, _NEWEST % owned, *values, state.value, before, limit)
    rows.sort(key=lambda row: -int(row["number"]))
    return [job_of(row) for row in rows[:limit]]


def pieces(
    connection: sqlite3.Connection, job_id: str, after: int, limit: int = 1000
) -> list[tuple[int, bytes]]:
    """Return (number, piece) for the pieces of a streamed output that follow the number `after`.

    The list ends at `limit` pieces, or with the piece that makes it reach PIECES_BYTES.
    """
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


def counts(connection: sqlite3.Connection, function: str, owner: str = ALL) -> JobCounts:
    """Return the numbers of an owner's jobs of a function."""
    query = f"SELECT {_COUNTS} FROM counters WHERE function = ? AND owner = ?"  # noqa: S608
    return JobCounts(*connection.execute(query, (function, owner)).fetchone() or ())


def all_counts(connection: sqlite3.Connection) -> dict[str, JobCounts]:
    """Return the numbers of each function's jobs."""
    rows = connection.execute(f"SELECT function, {_COUNTS} FROM counters WHERE owner = ?", (ALL,))  # noqa: S608
    return {function: JobCounts(*numbers) for function, *numbers in rows}


def functions_waiting(connection: sqlite3.Connection) -> list[str]:
    """Return the functions that have jobs in the queue."""
    return sorted(function for function, counts in all_counts(connection).items() if counts.in_queue)


def last_number(connection: sqlite3.Connection) -> int:
    """Return the row number (`jobs.number`) of the newest job; 0 if there is no job."""
    (number,) = connection.execute("SELECT max(number) FROM jobs").fetchone()
    return number or 0


def begun_alerts(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return (function, condition) of the alerts that have begun and not ended."""
    rows = connection.execute("SELECT function, condition FROM alerts")
    return [(row["function"], row["condition"]) for row in rows]

"""Looks at jobs: what is read from the database without changing it, each by an index."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Collection
from contextlib import closing

from ...errors import JobExpired, UnknownJob
from . import rows
from .job import Job, JobState
from .transaction import missing

_READY = "WHERE function = ? AND state = 'IN_QUEUE' AND due_s = 0 AND until_s > ? ORDER BY priority, jobs.number LIMIT ?"
_DELAYED = (
    "WHERE function = ? AND state = 'IN_QUEUE' AND due_s > 0 AND due_s <= ? AND until_s > ? "
    "ORDER BY priority, jobs.number LIMIT ?"
)
_NEWEST = "WHERE function = ? AND state = ? AND jobs.number < ? ORDER BY jobs.number DESC LIMIT ?"
_END = 1 << 62
PIECES_BYTES = 4 << 20
"""So much of a streamed answer is read at a time."""


def get(connection: sqlite3.Connection, function: str, job_id: str) -> Job:
    """A function's job; UnknownJob, or JobExpired if it was forgotten."""
    row = rows.row(connection, job_id, rows.WHOLE)
    if row is None or row["function"] != function:
        raise missing(connection, function, job_id)
    return rows.job(row)


def find(
    connection: sqlite3.Connection, job_id: str, allows: Callable[[str], bool], among: Collection[str]
) -> Job:
    """A job of a function that `allows`; JobExpired if one of those `among` had it, UnknownJob."""
    row = rows.row(connection, job_id, rows.WHOLE)
    if row is not None and allows(row["function"]):
        return rows.job(row)
    for function in among if row is None else ():
        if isinstance(why := missing(connection, function, job_id), JobExpired):
            raise why
    raise unknown(job_id)


def unknown(job_id: str) -> UnknownJob:
    """The one answer for a job that is not there, and for one that the caller is not to know of."""
    return UnknownJob(
        f"There is no job {job_id[:128]!r}.", remedy="Look at the id, and at what the API key covers."
    )


def due(connection: sqlite3.Connection, function: str, limit: int, now_s: float) -> list[Job]:
    """The queued jobs that may be taken, by priority, then by age; those whose ttl has passed are left out.

    Those that never had to wait have an index in this order; those that wait for another attempt are few.
    """
    found = connection.execute(rows.WHOLE + _READY, (function, now_s, limit)).fetchall()
    found += connection.execute(rows.WHOLE + _DELAYED, (function, now_s, now_s, limit)).fetchall()
    found.sort(key=lambda row: (row["priority"], row["number"]))
    return rows.jobs(found[:limit])


def next_due(connection: sqlite3.Connection, function: str, after_s: float) -> float | None:
    query = (
        "SELECT min(due_s) FROM jobs WHERE function = ? AND state = 'IN_QUEUE' AND due_s > 0 AND due_s > ?"
    )
    due_s: float | None = connection.execute(query, (function, after_s)).fetchone()[0]
    return due_s


def newest(
    connection: sqlite3.Connection, function: str, states: Collection[JobState], limit: int, before_id: str
) -> list[Job]:
    """Jobs in these states (none: in any), the newest first; the index has one order for each state."""
    before = _END
    if before_id:
        row = rows.row(connection, before_id)
        if row is None or row["function"] != function:
            raise missing(connection, function, before_id)
        before = row["number"]
    found: list[sqlite3.Row] = []
    for state in set(states) or set(JobState):
        found += connection.execute(rows.SLIM + _NEWEST, (function, state.value, before, limit)).fetchall()
    found.sort(key=lambda row: -int(row["number"]))
    return rows.jobs(found[:limit])


def pieces(connection: sqlite3.Connection, job_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
    """The pieces of a streamed answer with larger numbers: at least one, and no more once they are PIECES_BYTES."""
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


def running(connection: sqlite3.Connection, function: str, last: int) -> list[str]:
    """Those of a function's running jobs that have a number of at most `last`."""
    query = "SELECT id FROM jobs WHERE function = ? AND state = 'IN_PROGRESS' AND number <= ? ORDER BY number"
    return [job_id for (job_id,) in connection.execute(query, (function, last))]


def last_number(connection: sqlite3.Connection) -> int:
    """The number of the newest job."""
    (number,) = connection.execute("SELECT max(number) FROM jobs").fetchone()
    return number or 0

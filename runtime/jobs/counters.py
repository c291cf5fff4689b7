"""Counters: how many jobs a function has in which state, kept by whoever changes a state. Nothing is ever counted."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from .job import JobCounts, JobState

COLUMNS: Mapping[JobState, str] = {
    JobState.IN_QUEUE: "in_queue",
    JobState.IN_PROGRESS: "in_progress",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "failed",
    JobState.CANCELLED: "cancelled",
}
_NAMES = ("in_queue", "in_progress", "completed", "failed", "cancelled", "retried")


_INPUT_BYTES = "(SELECT length(body) FROM inputs WHERE number = ?)"
"""Of a job: SQLite knows a blob's length without reading it."""


def arrived(connection: sqlite3.Connection, function: str, input_bytes: int) -> None:
    """One more is in the queue."""
    connection.execute(
        "INSERT INTO counters (function, in_queue, queued_bytes) VALUES (?, 1, ?) ON CONFLICT (function) "
        "DO UPDATE SET in_queue = in_queue + 1, queued_bytes = queued_bytes + excluded.queued_bytes",
        (function, input_bytes),
    )


def moved(
    connection: sqlite3.Connection,
    function: str,
    number: int,
    was: JobState,
    to: JobState,
    *,
    retried: bool = False,
) -> None:
    """The job of this number has changed its state."""
    one_less, one_more = COLUMNS[was], COLUMNS[to]
    more = ", retried = retried + 1" if retried else ""
    if one_less != one_more:
        more += f", {one_less} = {one_less} - 1, {one_more} = {one_more} + 1"
    values: tuple[object, ...] = (function,)
    if (was is JobState.IN_QUEUE) != (to is JobState.IN_QUEUE):
        more += f", queued_bytes = queued_bytes {'-' if was is JobState.IN_QUEUE else '+'} {_INPUT_BYTES}"
        values = (number, function)
    if more:
        connection.execute(f"UPDATE counters SET {more[2:]} WHERE function = ?", values)  # noqa: S608  our names


def queued(connection: sqlite3.Connection, function: str) -> tuple[int, int]:
    """How many jobs wait, and how large their inputs are together."""
    query = "SELECT in_queue, queued_bytes FROM counters WHERE function = ?"
    row = connection.execute(query, (function,)).fetchone()
    return (row["in_queue"], row["queued_bytes"]) if row is not None else (0, 0)


def counts(connection: sqlite3.Connection, function: str) -> JobCounts:
    row = connection.execute("SELECT * FROM counters WHERE function = ?", (function,)).fetchone()
    return JobCounts(**{name: row[name] for name in _NAMES}) if row is not None else JobCounts()


def waiting(connection: sqlite3.Connection) -> list[str]:
    """The functions with jobs in the queue."""
    rows = connection.execute("SELECT function FROM counters WHERE in_queue > 0 ORDER BY function")
    return [function for (function,) in rows]

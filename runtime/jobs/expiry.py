"""Expiry: what waited too long ends, what was kept long enough is forgotten, and the file gives back what it left."""

from __future__ import annotations

import sqlite3
import time

from ...errors import DeadlineExceeded
from . import rows
from .identity import tombstone_key
from .job import JobOutcome, JobState
from .transaction import Transaction

SLICE_S = 0.05
"""For so long the writer may be kept busy at once."""
MAX_TOMBSTONES = 1_000_000
SPARE_PAGES = 1024
"""Free pages are used again by what comes next: so many, or a quarter of the file, are not given back."""
VACUUM_PAGES = 256
_INCREMENTAL = 2


def expire(turn: Transaction, limit: int) -> int:
    """Handle at most `limit` jobs whose time has come, and as many tombstones; how many those were."""
    until_s = time.monotonic() + SLICE_S
    found = turn.connection.execute(
        rows.SLIM + "WHERE until_s <= ? ORDER BY until_s LIMIT ?", (turn.now_s, limit)
    ).fetchall()
    done = 0
    for row in found:
        if row["state"] == JobState.IN_QUEUE:
            turn.end(row, JobOutcome(JobState.TIMED_OUT, error=_too_late(row)))
        else:
            _forget(turn, row)
        done += 1
        if time.monotonic() > until_s:
            break
    done += _remove_tombstones(turn, limit)
    _remove_deliveries(turn, limit)
    _give_back(turn.connection)
    return done


def next_expiry(connection: sqlite3.Connection, now_s: float) -> float | None:
    """When `expire` has something to do; None if there is nothing to wait for."""
    if _excess_pages(connection):
        return now_s
    oldest = connection.execute("SELECT until_s FROM tombstones ORDER BY number LIMIT 1").fetchone()
    (first,) = connection.execute("SELECT min(until_s) FROM jobs WHERE until_s IS NOT NULL").fetchone()
    return min((at for at in (first, oldest[0] if oldest else None) if at is not None), default=None)


def _too_late(row: sqlite3.Row) -> dict[str, object]:
    return DeadlineExceeded(
        f"Job {row['id']} waited in the queue for longer than its ttl of {row['ttl_s']:g} s.",
        remedy="Give it a longer ttl, or the function more workers.",
    ).to_wire()


def _forget(turn: Transaction, row: sqlite3.Row) -> None:
    """A job goes, with all that belongs to it; deliveries that are still to be made stay."""
    execute, number = turn.connection.execute, (row["number"],)
    execute("DELETE FROM jobs WHERE number = ?", number)
    execute("DELETE FROM inputs WHERE number = ?", number)
    execute("DELETE FROM results WHERE number = ?", number)
    if row["pieces"]:
        execute("DELETE FROM pieces WHERE job = ?", number)
    if row["webhook"] is not None:
        execute("DELETE FROM deliveries WHERE job_id = ? AND state <> 'PENDING'", (row["id"],))
    execute(
        "INSERT INTO tombstones (key, until_s) VALUES (?, ?)",
        (tombstone_key(row["function"], row["id"]), turn.now_s + turn.keep_s),
    )


def _remove_tombstones(turn: Transaction, limit: int) -> int:
    """The oldest ones, once they were kept long enough or there are too many; they lie in the order of their ends."""
    execute = turn.connection.execute
    (last,) = execute("SELECT max(number) FROM tombstones").fetchone()
    oldest = execute("SELECT number, until_s FROM tombstones ORDER BY number LIMIT ?", (limit,))
    ended = [number for number, until_s in oldest if until_s <= turn.now_s or number <= last - MAX_TOMBSTONES]
    if ended:
        execute("DELETE FROM tombstones WHERE number <= ?", (ended[-1],))
    return len(ended)


def _remove_deliveries(turn: Transaction, limit: int) -> None:
    """Those that were made, or given up, after their job was forgotten."""
    turn.connection.execute(
        "DELETE FROM deliveries WHERE rowid IN (SELECT rowid FROM deliveries "
        "WHERE state <> 'PENDING' AND created_s <= ? "
        "AND NOT EXISTS (SELECT 1 FROM jobs WHERE id = job_id) ORDER BY created_s LIMIT ?)",
        (turn.now_s - turn.keep_s, limit),
    )


def _give_back(connection: sqlite3.Connection) -> None:
    pages = min(_excess_pages(connection), VACUUM_PAGES)
    if pages:
        connection.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()  # each step gives back one page


def _excess_pages(connection: sqlite3.Connection) -> int:
    (vacuum,) = connection.execute("PRAGMA auto_vacuum").fetchone()
    if vacuum != _INCREMENTAL:
        return 0
    (free,) = connection.execute("PRAGMA freelist_count").fetchone()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    return int(max(0, free - max(SPARE_PAGES, pages // 4)))

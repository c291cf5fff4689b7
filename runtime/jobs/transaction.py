"""A turn: what one caller changes within the writer's transaction. The one place at which a job's state changes."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

import orjson

from ...errors import JobConflict, JobExpired, UnknownJob
from . import counters, rows
from .identity import tombstone_key
from .job import TRANSITIONS, Job, JobOutcome, JobState

Tell = Callable[[sqlite3.Connection, Job, str, float], object]
"""Called with each event that a job's webhook asked for, within the transaction that brings it about."""


class Transaction:
    """`wakes`, `told` and `changed` say who is to be woken once it is on the disk: functions, those who tell webhooks,
    those who wait for news of these jobs.
    """

    __slots__ = ("changed", "connection", "keep_s", "now_s", "tell", "told", "wakes")

    def __init__(self, connection: sqlite3.Connection, now_s: float, keep_s: float, tell: Tell) -> None:
        self.connection = connection
        self.now_s = now_s
        self.keep_s = keep_s
        self.tell = tell
        self.wakes: set[str] = set()
        self.told = False
        self.changed: list[str] = []

    def row_of(self, function: str, job_id: str) -> sqlite3.Row:
        """A function's job; UnknownJob, or JobExpired if it was forgotten."""
        found = rows.row(self.connection, job_id)
        if found is None or found["function"] != function:
            raise missing(self.connection, function, job_id)
        return found

    def held(self, job_id: str, fence: int) -> sqlite3.Row | None:
        """A running job, if it is still the attempt `fence` that holds it."""
        found = rows.row(self.connection, job_id)
        if found is None or found["state"] != JobState.IN_PROGRESS or found["attempts"] != fence:
            return None
        return found

    def move(self, row: sqlite3.Row, to: JobState, *, retried: bool = False, **fields: Any) -> None:
        """Bring a job from the state of `row` to another, with what always goes with that, and count it.

        JobConflict if the table of transitions has no such.
        """
        was = JobState(row["state"])
        if to not in TRANSITIONS[was]:
            raise JobConflict(f"Job {row['id']} is {was}: it cannot become {to}.")
        fields = {"state": to.value, **self._goes_with(to, row), **fields}
        changes = ", ".join(f"{name} = ?" for name in fields)
        changed = self.connection.execute(
            f"UPDATE jobs SET {changes} WHERE number = ? AND state = ? AND attempts = ?",  # noqa: S608  our names
            (*fields.values(), row["number"], was.value, row["attempts"]),
        )
        if changed.rowcount != 1:
            raise JobConflict(f"Job {row['id']} is no longer {was} in its attempt {row['attempts']}.")
        self.changed.append(row["id"])
        counters.moved(self.connection, row["function"], row["number"], was, to, retried=retried)
        if to is JobState.IN_QUEUE:
            self._clear(row)

    def end(self, row: sqlite3.Row, outcome: JobOutcome) -> None:
        """Bring a job to a final state, with its result, and tell of it."""
        error = orjson.dumps(outcome.error).decode() if outcome.error is not None else None
        self.move(row, outcome.state, error=error)
        if outcome.output is not None or outcome.logs:
            self.connection.execute(
                "INSERT INTO results (number, type, logs, body) VALUES (?, ?, ?, ?)",
                (row["number"], outcome.output_type, outcome.logs, outcome.output),
            )
        self.announce(row, "completed")

    def announce(self, row: sqlite3.Row, event: str) -> None:
        """Whoever asked for this event is told of it; what may be large is read only for that."""
        if event not in rows.events(row):
            return
        self.tell(
            self.connection, rows.numbered(self.connection, row["number"], rows.TOLD), event, self.now_s
        )
        self.told = True

    def _goes_with(self, to: JobState, row: sqlite3.Row) -> dict[str, Any]:
        if to is JobState.IN_QUEUE:
            nothing = {"started_s": 0.0, "ended_s": 0.0, "expires_s": 0.0, "progress": None, "pieces": 0}
            return {**nothing, "worker": "", "due_s": 0.0, "until_s": row["stale_s"]}
        if to is JobState.IN_PROGRESS:
            attempt = {"attempts": row["attempts"] + 1, "started_s": self.now_s}
            return {**attempt, "due_s": 0.0, "until_s": None}
        expires_s = self.now_s + self.keep_s
        return {"ended_s": self.now_s, "expires_s": expires_s, "until_s": expires_s}

    def _clear(self, row: sqlite3.Row) -> None:
        """A job that begins anew has no result and no pieces; its function has something to take."""
        self.connection.execute("DELETE FROM results WHERE number = ?", (row["number"],))
        if row["pieces"]:
            self.connection.execute("DELETE FROM pieces WHERE job = ?", (row["number"],))
        self.wakes.add(row["function"])


def missing(connection: sqlite3.Connection, function: str, job_id: str) -> UnknownJob | JobExpired:
    """Why there is no such job."""
    key = tombstone_key(function, job_id)
    if connection.execute("SELECT 1 FROM tombstones WHERE key = ?", (key,)).fetchone():
        return JobExpired(
            f"Job {job_id!r} of {function!r} has ended, and its result is no longer kept.",
            remedy="Ask sooner, or keep results longer.",
        )
    return UnknownJob(
        f"{function!r} has no job {job_id!r}.", remedy="Look at the id; `jobs list` shows them."
    )

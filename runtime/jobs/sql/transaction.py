"""Changes the states of jobs in a transaction. No other module changes a job's state.

Three mechanisms make a stored job safe:

Group commit: the writer thread takes all queued changes as one group, runs them in one transaction, and commits once,
durably. A change that fails is undone alone. A caller gets its result after the commit. So every id and state that a
caller sees is durably on disk, and all callers of the group share one fsync.

Fence (see job_store.py): `running_row` returns None if the fence of an attempt is out of date.

Counters: a function's rows of `counters` contain the number of jobs in each state, over all owners and for each owner.
They are updated in the transaction that changes the state, so they are exact even after a crash.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import JobConflict, JobExpired, UnknownJob
from ...ground.access.keys import ALL
from ..stored.job import (
    COUNTERS,
    TRANSITIONS,
    Job,
    JobCounts,
    JobOutcome,
    JobState,
    NewJob,
    new_job_id,
    tombstone_key,
)
from ..stored.job_changes import JobChanges
from ..stored.webhook_body import WebhookBodies
from . import outbox
from .connection import SqlConnection, SqlRow
from .rows import (
    SELECT_WHOLE,
    SELECT_WITH_RESULT,
    SELECT_WITHOUT_BODIES,
    counts,
    error_text,
    find_row,
    insert_job,
    large_bodies,
    read_job,
    stored_bytes,
    webhook_of,
)

_COUNT_NEW = """
INSERT INTO counters (function, owner, in_queue, queued_bytes) VALUES (?, ?, 1, ?) ON CONFLICT (function, owner)
DO UPDATE SET in_queue = counters.in_queue + 1, queued_bytes = counters.queued_bytes + excluded.queued_bytes"""
_COUNT_ENDED = {
    state: f"INSERT INTO counters (function, owner, {name}) VALUES (?, ?, 1) "  # noqa: S608
    f"ON CONFLICT (function, owner) DO UPDATE SET {name} = counters.{name} + 1"
    for state, name in COUNTERS.items()
}


@dataclass(slots=True)
class Transaction:
    """One caller's part of a group's transaction."""

    connection: SqlConnection
    now_s: float
    keep_s: float
    """How long the jobs that end in this transaction are kept."""
    bodies: WebhookBodies = field(default_factory=dict)
    """By `Webhook.form`, the functions that make the bodies of webhooks, for all forms except ""."""
    incarnation: str = ""
    """The incarnation of the gateway that takes jobs in this transaction."""
    most_stored_bytes: int = sys.maxsize
    changes: JobChanges = field(default_factory=JobChanges)
    unused_bodies: set[str] = field(default_factory=set)
    """The names of large bodies to which no row refers after this transaction. They are deleted after the commit."""

    def row(self, job_id: str, select: str = SELECT_WITHOUT_BODIES) -> SqlRow | None:
        """Return the row of a job, or None; see `find_row`."""
        return find_row(self.connection, job_id, select)

    def row_of_key(self, digest: bytes | None) -> SqlRow | None:
        """Return the row of the job with this digest of an idempotency key, with its bodies, or None."""
        row: SqlRow | None = self.connection.execute(
            SELECT_WHOLE + "WHERE idempotency = ?", (digest,)
        ).fetchone()
        return row

    def counts(self, function: str, owner: str) -> JobCounts:
        return counts(self.connection, function, owner)

    def stored_bytes(self, *owners: str) -> dict[str, int]:
        return stored_bytes(self.connection, *owners)

    def running_row(self, job_id: str, fence: int) -> SqlRow | None:
        """Return the row of the job if it runs and its current attempt has this fence, else None."""
        row = self.row(job_id)
        if row is None or row["state"] != JobState.IN_PROGRESS or row["attempts"] != fence:
            return None
        return row

    def add(self, new: NewJob, job_id: str = "") -> Job | None:
        """Insert a new job into its function's queue and return it, or None if there is a job with its id or its
        idempotency key.
        """
        job = new.queued(new.wanted_id or job_id or new_job_id(self.now_s), self.now_s)
        if self._insert(new, job) is None:
            return None
        self.unused_bodies.discard(new.large_input)
        self._count_new(new, JobState.IN_QUEUE)
        self.count_bytes(new.owner, len(new.input))
        self.changes.queued.add(new.function)
        return job

    def add_ended(self, new: NewJob, job: Job, outcome: JobOutcome) -> Job | None:
        """Insert a job whose first attempt has ended, and return it, or None if there is a job with its id or its
        idempotency key. The rows are the same as after `add`, `move` and `end`.
        """
        expires_s = self.now_s + self.keep_s
        ended = replace(
            job, state=outcome.state, attempts=1, ended_s=self.now_s, expires_s=expires_s, error=outcome.error,
            output=outcome.output, output_type=outcome.output_type, logs=outcome.logs,
            metrics=outcome.metrics,
        )  # fmt: skip
        number = self._insert(
            new, ended, attempts=1, worker=job.worker, started_s=job.started_s,
            ended_s=self.now_s, expires_s=expires_s, until_s=expires_s,
            error=error_text(outcome), result_size=outcome.size_bytes,
        )  # fmt: skip
        if number is None:
            return None
        self._count_new(new, outcome.state)
        self.unused_bodies.discard(new.large_input)
        self._insert_result(number, outcome)
        self.count_bytes(new.owner, len(new.input) + outcome.size_bytes)
        return ended

    def move(self, row: SqlRow, to: JobState, *, retried: bool = False, **fields: Any) -> None:
        """Change the state of the job in `row` and set the columns in `fields`. With `retried`, count a retry.

        Raise JobConflict if TRANSITIONS does not allow this change.
        """
        was = JobState(row["state"])
        if to not in TRANSITIONS[was]:
            raise JobConflict(f"Job {row['id']} is {was}: it cannot become {to}.")
        self._update(row, {"state": to.value, **self._fields_of(to, row), **fields})
        self._count(row, was, to, retried=retried)
        if to is JobState.IN_QUEUE:
            self.count_bytes(row["owner"], -row["result_size"])
            self.unused_bodies.update(large_bodies(self.connection, row["number"], "results"))
            self.connection.execute("DELETE FROM results WHERE number = ?", (row["number"],))
            self.connection.execute("DELETE FROM pieces WHERE job = ?", (row["number"],))
            self.changes.queued.add(row["function"])

    def end(self, row: SqlRow, outcome: JobOutcome) -> None:
        """Move a job to a final state, store its result and add the webhook delivery of "completed"."""
        result_size = row["result_size"] + outcome.size_bytes
        self.move(row, outcome.state, error=error_text(outcome), result_size=result_size)
        if outcome.state is JobState.CANCELLED:
            self.changes.cancelled.append((row["function"], row["id"]))
        self._insert_result(row["number"], outcome)
        self.count_bytes(row["owner"], outcome.size_bytes)
        self.notify(row, "completed")

    def touch(self, row: SqlRow, **fields: Any) -> None:
        """Set the columns in `fields`, and add the webhook delivery of "output"."""
        self._update(row, fields)
        self.notify(row, "output")

    def notify(self, row: SqlRow, event: str, logs: str = "") -> None:
        """Add a webhook delivery if the job's webhook subscribes to the event. `logs` are the lines that a running job
        has logged.
        """
        if (webhook := webhook_of(row)) is not None and event in webhook.events:
            select = SELECT_WHOLE if webhook.form else SELECT_WITH_RESULT
            job = read_job(self.connection, row["number"], select)
            outbox.add(self.connection, replace(job, logs=logs or job.logs), event, self.now_s, self.bodies)
            self.changes.notified = True

    def count_bytes(self, owner: str, added: int) -> None:
        """Count bytes of inputs and results that were stored for an owner, or deleted."""
        if not added:
            return
        for one in (ALL, owner) if owner else (ALL,):
            self.changes.stored[one] = self.changes.stored.get(one, 0) + added
            self._add_bytes(one, added)
        if added < 0:
            self.connection.execute("DELETE FROM stored WHERE owner = ? AND bytes <= 0", (owner,))

    def insert_pieces(self, pieces: Sequence[tuple[int, int, bytes]]) -> None:
        """Insert pieces of outputs, as (row number of the job, number, piece)."""
        insert = "INSERT INTO pieces (job, number, body) VALUES (?, ?, ?)"
        self.connection.executemany(insert, pieces)

    def _insert(self, new: NewJob, job: Job, **more: Any) -> int | None:
        """Insert a new job, and return its row number or None; see `insert_job`."""
        return insert_job(self.connection, new, job, **more)

    def _add_bytes(self, owner: str, added: int) -> None:
        self.connection.execute(
            "INSERT INTO stored VALUES (?, ?) ON CONFLICT (owner) DO UPDATE SET bytes = stored.bytes + excluded.bytes",
            (owner, added),
        )

    def _insert_result(self, number: int, outcome: JobOutcome) -> None:
        if outcome.output is not None or outcome.logs or outcome.metrics:
            body = None if outcome.large_output else outcome.output
            self.connection.execute(
                "INSERT INTO results (number, type, logs, body, metrics, large) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    number,
                    outcome.output_type,
                    outcome.logs.encode(),
                    body,
                    outcome.metrics,
                    outcome.large_output,
                ),
            )
            self.unused_bodies.discard(outcome.large_output)

    def _update(self, row: SqlRow, fields: Mapping[str, Any]) -> None:
        assignments = ", ".join(f"{name} = ?" for name in fields)
        update = f"UPDATE jobs SET {assignments} WHERE number = ?"  # noqa: S608
        self.connection.execute(update, (*fields.values(), row["number"]))
        self.changes.changed.append(row["id"])

    def _fields_of(self, to: JobState, row: SqlRow) -> dict[str, Any]:
        if to is JobState.IN_QUEUE:
            unset = {"started_s": 0.0, "ended_s": 0.0, "expires_s": 0.0, "progress": None, "pieces": 0}
            return {
                **unset,
                "result_size": 0,
                "worker": "",
                "incarnation": "",
                "due_s": 0.0,
                "until_s": row["stale_s"],
            }
        if to is JobState.IN_PROGRESS:
            attempt = {
                "attempts": row["attempts"] + 1,
                "started_s": self.now_s,
                "incarnation": self.incarnation,
            }
            return {**attempt, "due_s": 0.0, "until_s": None}
        expires_s = self.now_s + self.keep_s
        return {"ended_s": self.now_s, "expires_s": expires_s, "until_s": expires_s}

    def _count_new(self, new: NewJob, state: JobState) -> None:
        """Count a new job that is in the queue or has ended."""
        for owner in (ALL, new.owner) if new.owner else (ALL,):
            if state is JobState.IN_QUEUE:
                self.connection.execute(_COUNT_NEW, (new.function, owner, len(new.input)))
            else:
                self.connection.execute(_COUNT_ENDED[state], (new.function, owner))

    def _count(self, row: SqlRow, was: JobState, to: JobState, *, retried: bool) -> None:
        less, more = COUNTERS[was], COUNTERS[to]
        queued = (to is JobState.IN_QUEUE) - (was is JobState.IN_QUEUE)
        states = f"{less} = {less} - 1, {more} = {more} + 1, retried = retried + ?"
        changes = f"{states}, queued_bytes = queued_bytes + ?"
        update = f"UPDATE counters SET {changes} WHERE function = ? AND owner IN (?, ?)"  # noqa: S608
        values = (int(retried), queued * row["size"], row["function"], ALL, row["owner"])
        self.connection.execute(update, values)


def row_of(
    connection: SqlConnection,
    function: str,
    job_id: str,
    owner: str,
    select: str = SELECT_WITHOUT_BODIES,
) -> SqlRow:
    """Return the row of an owner's job. `select` is a query of `rows.py`. If there is no job, raise the error of `missing`."""
    row = find_row(connection, job_id, select)
    if row is None or row["function"] != function or owner not in (ALL, row["owner"]):
        raise missing(connection, function, job_id, owner)
    return row


def missing(connection: SqlConnection, function: str, job_id: str, owner: str) -> UnknownJob | JobExpired:
    """Return the error for a job that the owner does not have: JobExpired if it was deleted."""
    deleted = "SELECT 1 FROM tombstones WHERE key = ? AND ? IN (owner, ?)"
    if connection.execute(deleted, (tombstone_key(function, job_id), owner, ALL)).fetchone():
        return JobExpired(
            f"Job {job_id!r} of {function!r} has ended, and its result was deleted.",
            remedy="Ask sooner, or keep results longer.",
        )
    return UnknownJob(f"{function!r} has no job {job_id!r}.", remedy="`jobs list` shows all ids.")

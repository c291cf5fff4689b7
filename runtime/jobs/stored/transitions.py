"""Changes jobs, from submit to deletion. `JobStore` runs each public function here in one Transaction."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Collection, Sequence

import orjson

from ....errors import DeadlineExceeded, IdempotencyConflict, JobConflict, QueueFull, WorkerDied
from ...ground.access.fair_share import share_used
from ...ground.access.keys import ALL
from ..webhooks.delivery import JOB, Delivery
from . import outbox, queries
from .alert import Alert
from .job import Job, JobOutcome, JobState, NewJob, idempotency_digest, tombstone_key
from .large_bodies import same_body
from .schema import (
    SELECT_WHOLE,
    find_row,
    find_rows,
    job_of,
    large_bodies,
    read_job,
    size_of_input,
    size_of_result,
    stored_bytes,
)
from .stored_bytes import StoredBytes
from .transaction import Transaction, row_of

PURGE_SLICE = 500
"""The most jobs that one transaction cancels. The limit keeps the waiting time of other writers short."""
EXPIRY_SLICE_S = 0.05
"""A transaction that expires jobs handles no further job after this time."""
_SHIFTS = (
    """UPDATE jobs SET until_s = until_s + ?1, stale_s = stale_s + ?1, due_s = due_s + ?1 * (due_s > 0),
        expires_s = expires_s + ?1 * (expires_s > 0)""",
    """UPDATE jobs SET created_s = created_s + ?1, started_s = started_s + ?1 * (started_s > 0)
        WHERE state IN ('IN_QUEUE', 'IN_PROGRESS')""",
    "UPDATE deliveries SET next_s = next_s + ?1, created_s = created_s + ?1",
    "UPDATE tombstones SET until_s = until_s + ?1",
)
UNSENT_S = 60.0
"""How much longer a job stays each time if a delivery still needs its large bodies."""
MAX_TOMBSTONES = 1_000_000
"""If there are more tombstones than this, the oldest are deleted before they expire."""
SPARE_PAGES = 1024
"""This many free pages stay in the file for reuse, or a quarter of its pages if that is more."""
VACUUM_PAGES = 256
"""The most free pages that one transaction returns to the file system."""


def submit(transaction: Transaction, new: NewJob) -> tuple[Job, bool]:
    """Queue a new job and return (job, False).

    If a job with the same idempotency key exists, return (that job, True) and queue nothing.

    :raises IdempotencyConflict: if the job with the same key has another input.
    :raises JobConflict: if another job has the wanted id.
    :raises QueueFull: if the job would exceed the limits `max_queued` or `max_queued_bytes` of `new`, or the limit of
        stored bytes.
    """
    if new.idempotency and (earlier := _submitted(transaction, new)) is not None:
        return earlier, True
    if new.wanted_id and find_row(transaction.connection, new.wanted_id) is not None:
        raise JobConflict(f"There is another job {new.wanted_id!r}.", remedy="Choose another id.")
    _check_room(transaction, new)
    return transaction.add(new), False


def admit(transaction: Transaction, new: NewJob) -> Job:
    """Store a new job that already waits in its revision's queue. This raises the same errors as `submit`."""
    job, _ = submit(transaction, new)
    # The job is in the revision's queue already, so the dispatcher need not be notified.
    transaction.queued.clear()
    return job


def _submitted(transaction: Transaction, new: NewJob) -> Job | None:
    digest = idempotency_digest(new.function, new.owner, new.idempotency)
    row = transaction.connection.execute(SELECT_WHOLE + "WHERE idempotency = ?", (digest,)).fetchone()
    if row is None:
        return None
    job = job_of(row)
    same = same_body(job.large_input, new.large_input) and (new.large_input or job.input == new.input)
    if not same or job.content_type != new.content_type:
        raise IdempotencyConflict(
            f"Job {job.id} was submitted with the same idempotency key and another input.",
            remedy="Use a new key for a new input.",
        )
    return job


def _check_room(transaction: Transaction, new: NewJob) -> None:
    """Raise QueueFull if the queue or the store has no room for this owner. The error does not tell what other callers
    have queued.
    """
    stored = StoredBytes(transaction.most_stored_bytes)
    stored.load(stored_bytes(transaction.connection, ALL, new.owner))
    if (refusal := stored.refusal(new.owner, len(new.input))) is not None:
        raise refusal
    all_jobs, most_bytes = queries.counts(transaction.connection, new.function), new.max_queued_bytes
    if new.max_queued is not None and all_jobs.in_queue >= new.max_queued:
        raise QueueFull(
            f"The queue of {new.function!r} has as many jobs as max_jobs allows, which is {new.max_queued}.",
            remedy="Try again later, or raise max_jobs or scale.max in pilotflame.toml.",
        )
    # An empty queue accepts an input of any size.
    if most_bytes is not None and all_jobs.in_queue and all_jobs.queued_bytes + len(new.input) > most_bytes:
        raise QueueFull(
            f"The queue of {new.function!r} has no room for {len(new.input)} bytes; the limit is {most_bytes}.",
            remedy="Try again later, or raise scale.max in pilotflame.toml.",
        )
    if not new.owner:
        return
    own = queries.counts(transaction.connection, new.function, new.owner)
    if new.max_queued is not None and share_used(own.in_queue, new.max_queued - all_jobs.in_queue):
        raise _share_used(new, f"{own.in_queue} jobs", "max_jobs or scale.max")
    if (
        most_bytes is not None
        and own.in_queue
        and share_used(own.queued_bytes, most_bytes - all_jobs.queued_bytes)
    ):
        raise _share_used(new, f"{own.queued_bytes} bytes", "scale.max")


def _share_used(new: NewJob, held: str, settings: str) -> QueueFull:
    message = (
        f"The queue of {new.function!r} has your {held}. The rest of its room is kept for other callers."
    )
    return QueueFull(message, remedy=f"Try again later, or raise {settings} in pilotflame.toml.")


def take(transaction: Transaction, job_id: str, worker: str = "") -> int | None:
    """Start an attempt on `worker` and return its fence. Return None if the job is not in the queue."""
    row = find_row(transaction.connection, job_id)
    if row is None or row["state"] != JobState.IN_QUEUE:
        return None
    transaction.move(row, JobState.IN_PROGRESS, worker=worker)
    transaction.notify(row, "start")
    return int(row["attempts"]) + 1


def finish(transaction: Transaction, job_id: str, fence: int, outcome: JobOutcome) -> bool:
    """End the attempt `fence` and its job. Return False if this is no longer the job's running attempt."""
    if not outcome.state.final:
        raise JobConflict(f"A job cannot end as {outcome.state}.")
    row = transaction.running_row(job_id, fence)
    if row is not None:
        transaction.end(row, outcome)
    return row is not None


def requeue(
    transaction: Transaction, job_id: str, fence: int, failure: JobOutcome, delay_s: float, *, counted: bool
) -> bool:
    """End the attempt `fence` and queue the job again, to start after `delay_s`.

    If this was the last attempt that the job may have, end the job with `failure` instead. With `counted=False`, the
    job may have one attempt more. This is for a failure that the job did not cause. Return False if this is no longer
    the job's running attempt.
    """
    row = transaction.running_row(job_id, fence)
    if row is None:
        return False
    if counted and row["attempts"] >= row["max_attempts"]:
        transaction.end(row, failure)
    else:
        due_s = transaction.now_s + delay_s if delay_s > 0 else 0.0
        max_attempts = row["max_attempts"] + (0 if counted else 1)
        error = orjson.dumps(failure.error).decode() if failure.error is not None else None
        transaction.move(row, JobState.IN_QUEUE, due_s=due_s, error=error, max_attempts=max_attempts)
    return True


def recover(transaction: Transaction) -> tuple[int, int]:
    """Queue the jobs again that were running when the gateway died, and end the jobs whose last attempt was running.

    Return how many are queued again, and how many have FAILED.
    """
    running, again = find_rows(transaction.connection, "WHERE state = 'IN_PROGRESS'"), 0
    for row in running:
        if row["attempts"] < row["max_attempts"]:
            transaction.move(row, JobState.IN_QUEUE)
            again += 1
            continue
        error = WorkerDied(
            f"The gateway ended during attempt {row['attempts']} of {row['max_attempts']}.",
            remedy="Look in the function's logs for the cause, then retry the job.",
        )
        transaction.end(row, JobOutcome(JobState.FAILED, error=error.to_wire()))
    return again, len(running) - again


def give_up(transaction: Transaction, job_id: str, outcome: JobOutcome) -> None:
    """End a queued job, which cannot be run."""
    row = find_row(transaction.connection, job_id)
    if row is not None and row["state"] == JobState.IN_QUEUE:
        transaction.end(row, outcome)


def add_pieces(
    transaction: Transaction, job_id: str, fence: int, first_number: int, pieces: Sequence[bytes]
) -> bool:
    """Store pieces of a streamed output. Pieces are numbered from 1, and `pieces[0]` has `first_number`.

    Pieces that are already stored are skipped. Return False if `fence` is no longer the job's running
    attempt. Raises JobConflict if there would be a gap between the stored pieces and `first_number`.
    """
    row = transaction.running_row(job_id, fence)
    if row is None:
        return False
    if not 1 <= first_number <= row["pieces"] + 1:
        raise JobConflict(f"Job {job_id} has {row['pieces']} pieces: number {first_number} cannot follow.")
    numbered = [(row["number"], first_number + index, piece) for index, piece in enumerate(pieces)]
    new = numbered[row["pieces"] + 1 - first_number :]
    if new:
        transaction.connection.executemany("INSERT INTO pieces (job, number, body) VALUES (?, ?, ?)", new)
        transaction.count_bytes(row["owner"], sum(len(piece) for _, _, piece in new))
        transaction.touch(row, pieces=new[-1][1])
    return True


def set_progress(transaction: Transaction, job_id: str, fence: int, progress: bytes) -> bool:
    """Store a progress report. Return False if `fence` is no longer the job's running attempt."""
    row = transaction.running_row(job_id, fence)
    if row is not None:
        transaction.touch(row, progress=progress)
    return row is not None


def tell_logs(transaction: Transaction, job_id: str, fence: int, logs: str) -> bool:
    """Add the webhook delivery of "logs". Return False if `fence` is no longer the job's running attempt."""
    row = transaction.running_row(job_id, fence)
    if row is not None:
        transaction.notify(row, "logs", logs)
    return row is not None


def cancel(transaction: Transaction, function: str, job_id: str, owner: str = ALL) -> Job:
    """End a job as CANCELLED unless it is already final, and return it. Raise JobExpired or UnknownJob."""
    row = row_of(transaction.connection, function, job_id, owner)
    if not JobState(row["state"]).final:
        transaction.end(row, JobOutcome(JobState.CANCELLED))
    return read_job(transaction.connection, row["number"], SELECT_WHOLE)


def retry(transaction: Transaction, function: str, job_id: str, owner: str = ALL) -> Job:
    """Queue a FAILED or TIMED_OUT job again under its id, with new attempts and a new ttl. Return the job.

    Raises JobConflict if the job is in another state or its function was deleted, JobExpired or UnknownJob.
    """
    row = row_of(transaction.connection, function, job_id, owner)
    if row["state"] not in (JobState.FAILED, JobState.TIMED_OUT):
        raise JobConflict(
            f"Job {job_id} is {row['state']}: only jobs that FAILED or TIMED_OUT can be retried.",
            remedy="Submit its input again.",
        )
    if not row["allowed"]:
        raise JobConflict(f"The function of job {job_id} was deleted.", remedy="Submit its input again.")
    stale_s = transaction.now_s + row["ttl_s"]
    attempts = {"retries": row["retries"] + 1, "max_attempts": row["attempts"] + row["allowed"]}
    fields = {**attempts, "error": None, "stale_s": stale_s, "until_s": stale_s}
    transaction.move(row, JobState.IN_QUEUE, retried=True, **fields)
    return read_job(transaction.connection, row["number"], SELECT_WHOLE)


def purge(transaction: Transaction, function: str, last: int, *, owner: str, running: bool) -> int:
    """Cancel up to PURGE_SLICE queued jobs whose numbers are at most `last`, and return how many.

    If `running` is True, this includes running jobs. If there are none left, forbid the retry of up to PURGE_SLICE ended
    jobs, and return how many: another owner may deploy the next function of this name.
    """
    owned, values = ("", (function,)) if owner == ALL else (queries.OWNED, (function, owner))
    where = f"WHERE function = ? AND {owned} state IN ('IN_QUEUE', ?) AND jobs.number <= ? LIMIT ?"
    also = JobState.IN_PROGRESS if running else ""
    rows = find_rows(transaction.connection, where, *values, also, last, PURGE_SLICE)
    for row in rows:
        transaction.end(row, JobOutcome(JobState.CANCELLED))
    if rows or not running:
        return len(rows)
    ended = f"function = ? AND {owned} state IN ('FAILED', 'TIMED_OUT') AND number <= ? AND allowed > 0"
    forbid = f"UPDATE jobs SET allowed = 0 WHERE number IN (SELECT number FROM jobs WHERE {ended} LIMIT ?)"  # noqa: S608
    return transaction.connection.execute(forbid, (*values, last, PURGE_SLICE)).rowcount


def redeliver(transaction: Transaction, function: str, delivery_id: str, owner: str = ALL) -> Delivery:
    """Send a webhook delivery again, whatever its state is. See `outbox.redeliver`."""
    transaction.notified = True
    return outbox.redeliver(transaction.connection, function, delivery_id, transaction.now_s, owner)


def alert(transaction: Transaction, alert: Alert) -> None:
    """Add the delivery of an alert, and store whether its condition has begun."""
    outbox.add_alert(transaction.connection, alert, transaction.now_s)
    transaction.notified = True
    if alert.begun:
        values = (alert.function, alert.condition, transaction.now_s)
        transaction.connection.execute("INSERT OR REPLACE INTO alerts VALUES (?, ?, ?)", values)
    else:
        drop_alerts(transaction, alert.function, (alert.condition,))


def drop_alerts(transaction: Transaction, function: str, conditions: Collection[str]) -> None:
    """Delete the stored facts that conditions of a function have begun."""
    for condition in conditions:
        drop = "DELETE FROM alerts WHERE function = ? AND condition = ?"
        transaction.connection.execute(drop, (function, condition))


def expire(transaction: Transaction, limit: int = 200) -> int:
    """Time out queued jobs whose ttl has passed, and delete final jobs whose retention has passed.

    Also delete old tombstones and deliveries of deleted jobs, and give free pages back to the file system.
    One call handles at most `limit` jobs and `limit` tombstones, and returns how many it handled. Call it
    again as long as `next_expiry` returns a time that has passed.
    """
    until_s = time.monotonic() + EXPIRY_SLICE_S
    where, done = "WHERE until_s <= ? ORDER BY until_s LIMIT ?", 0
    for row in find_rows(transaction.connection, where, transaction.now_s, limit):
        if row["state"] == JobState.IN_QUEUE:
            error = DeadlineExceeded(
                f"Job {row['id']} waited in the queue for longer than its ttl of {row['ttl_s']:g} s.",
                remedy="Give it a longer ttl, or the function more workers.",
            )
            transaction.end(row, JobOutcome(JobState.TIMED_OUT, error=error.to_wire()))
        else:
            _delete(transaction, row)
        done += 1
        if time.monotonic() > until_s:
            break
    deleted = _delete_tombstones(transaction, limit)
    outbox.delete_orphans(transaction.connection, transaction.now_s - transaction.keep_s, limit)
    if pages := min(_excess_pages(transaction.connection), VACUUM_PAGES):
        # The pragma releases one page for each row that is fetched, so all rows must be fetched.
        transaction.connection.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()
    return done + deleted


def shift(connection: sqlite3.Connection, by_s: float) -> None:
    """Move the ends of all waits by the seconds by which the clock was set, and the times from which unfinished jobs wait."""
    for change in _SHIFTS:
        connection.execute(change, (by_s,))


def next_expiry(connection: sqlite3.Connection, now_s: float) -> float:
    """Return the time at which `expire` has something to do, or infinity if nothing will expire."""
    if _excess_pages(connection):
        return now_s
    first = connection.execute("SELECT until_s FROM jobs WHERE until_s IS NOT NULL ORDER BY until_s LIMIT 1")
    oldest = connection.execute("SELECT until_s FROM tombstones ORDER BY number LIMIT 1")
    return min((until_s for (until_s,) in (*first, *oldest)), default=math.inf)


def _delete(transaction: Transaction, row: sqlite3.Row) -> None:
    """Delete a job and its ended webhook deliveries, and add a tombstone. Pending deliveries are kept.

    A job stays for UNSENT_S more if a delivery needs its large bodies, which are not in the delivery.
    """
    execute, number = transaction.connection.execute, (row["number"],)
    if row["webhook"] is not None and outbox.needs_job(transaction.connection, row["id"]):
        execute("UPDATE jobs SET until_s = ? WHERE number = ?", (transaction.now_s + UNSENT_S, *number))
        return
    size = size_of_input(transaction.connection, *number) + size_of_result(transaction.connection, *number)
    transaction.count_bytes(row["owner"], -size)
    transaction.unused_bodies.update(large_bodies(transaction.connection, *number))
    for table in ("jobs", "inputs", "results"):
        execute(f"DELETE FROM {table} WHERE number = ?", number)  # noqa: S608
    if row["pieces"]:
        execute("DELETE FROM pieces WHERE job = ?", number)
    if row["webhook"] is not None:
        execute("DELETE FROM deliveries WHERE subject = ? AND state <> 'PENDING'", (JOB + row["id"],))
    execute(
        "INSERT INTO tombstones (key, until_s, owner) VALUES (?, ?, ?)",
        (tombstone_key(row["function"], row["id"]), transaction.now_s + transaction.keep_s, row["owner"]),
    )


def _delete_tombstones(transaction: Transaction, limit: int) -> int:
    """Delete tombstones that have expired or exceed MAX_TOMBSTONES, and return how many.

    Only the `limit` oldest tombstones are examined.
    """
    execute = transaction.connection.execute
    (last,) = execute("SELECT max(number) FROM tombstones").fetchone()
    oldest = execute("SELECT number, until_s FROM tombstones ORDER BY number LIMIT ?", (limit,))
    now_s, excess = transaction.now_s, (last or 0) - MAX_TOMBSTONES
    expired = [number for number, until_s in oldest if until_s <= now_s or number <= excess]
    if expired:
        execute("DELETE FROM tombstones WHERE number <= ?", (expired[-1],))
    return len(expired)


def _excess_pages(connection: sqlite3.Connection) -> int:
    """Return how many free pages the file has beyond the pages that it keeps for reuse (see SPARE_PAGES).

    Return 0 for a file without incremental vacuum (`auto_vacuum` is not 2): its pages cannot be released.
    """
    pragmas = "pragma_auto_vacuum, pragma_freelist_count, pragma_page_count"
    query = f"SELECT auto_vacuum = 2, freelist_count, page_count FROM {pragmas}"  # noqa: S608
    incremental, free, pages = connection.execute(query).fetchone()
    return int(incremental * max(0, free - max(SPARE_PAGES, pages // 4)))

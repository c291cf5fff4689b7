"""Changes jobs, from submit to deletion. `job_store.py` says what each public function does.

`SqlJobStore` runs each of them in one Transaction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ....errors import DeadlineExceeded, JobConflict, QueueFull, WorkerDied
from ...ground.access.keys import ALL
from ..stored.admission import check_room, check_same, is_same
from ..stored.alert import Alert
from ..stored.job import Job, JobCounts, JobOutcome, JobState, NewJob, idempotency_digest, tombstone_key
from ..stored.large_bodies import UNSENT_S, same_body
from ..stored.stored_bytes import StoredBytes
from ..webhooks.delivery import JOB, Delivery
from . import outbox, queries
from .connection import SqlConnection, SqlRow
from .rows import (
    SELECT_WHOLE,
    SELECT_WITH_RESULT,
    error_text,
    find_rows,
    job_of,
    large_bodies,
    read_job,
)
from .transaction import Transaction, row_of

PURGE_SLICE = 500
"""The most jobs that one transaction cancels. The limit keeps the waiting time of other writers short."""
EXPIRY_SLICE_S = 0.05
"""A transaction that expires jobs handles no further job after this time."""
_BEGUN = """INSERT INTO alerts (function, condition, begun_s) VALUES (?, ?, ?)
    ON CONFLICT (function, condition) DO UPDATE SET begun_s = excluded.begun_s"""
MAX_TOMBSTONES = 1_000_000
"""If there are more tombstones than this, the oldest are deleted before they expire."""


def submit(transaction: Transaction, new: NewJob, job_id: str = "") -> tuple[Job, bool]:
    if new.idempotency and (earlier := _submitted(transaction, new)) is not None:
        return earlier, earlier.id != job_id
    if new.wanted_id and transaction.row(new.wanted_id) is not None:
        raise _taken(new.wanted_id)
    try:
        _check_room(transaction, new)
    except QueueFull:
        if transaction.row(job_id) is None:
            raise
        return _added(transaction, new, job_id), False
    return transaction.add(new, job_id) or _added(transaction, new, job_id), False


def _added(transaction: Transaction, new: NewJob, job_id: str) -> Job:
    """Return the job that an earlier call with `job_id` has stored. Raise JobConflict if that job differs from `new`."""
    row = transaction.row(job_id, SELECT_WHOLE)
    if row is None or (row["function"], row["owner"]) != (new.function, new.owner):
        raise _taken(job_id)
    job = _kept(transaction, row)
    if not is_same(job, new):
        raise _taken(job_id)
    return job


def _kept(transaction: Transaction, row: SqlRow) -> Job:
    """Return the job of a row, and do not delete its large bodies. If the answer to an earlier commit was lost, that
    commit has stored the same bodies.
    """
    job = job_of(row)
    transaction.unused_bodies -= {job.large_input, job.large_output}
    return job


def _taken(job_id: str) -> JobConflict:
    return JobConflict(f"There is another job {job_id!r}.", remedy="Choose another id.")


def start(transaction: Transaction, new: NewJob, job_id: str, worker: str) -> int | None:
    if transaction.add(new, job_id) is None:
        _added(transaction, new, job_id)
    return take(transaction, job_id, worker)


def record(transaction: Transaction, new: NewJob, job: Job, outcome: JobOutcome) -> Job:
    return transaction.add_ended(new, job, outcome) or _added(transaction, new, job.id)


def admit(transaction: Transaction, new: NewJob, job_id: str) -> Job:
    job, _ = submit(transaction, new, job_id)
    # The job is in the revision's queue already, so the dispatcher need not be notified.
    transaction.changes.queued.clear()
    return job


def _submitted(transaction: Transaction, new: NewJob) -> Job | None:
    """Return the job that was submitted with the same idempotency key, or None. Raise IdempotencyConflict."""
    digest = idempotency_digest(new.function, new.owner, new.idempotency)
    if (row := transaction.row_of_key(digest)) is None:
        return None
    check_same(job := _kept(transaction, row), new)
    return job


def _check_room(transaction: Transaction, new: NewJob) -> None:
    """Raise QueueFull if the queue or the store has no room for this owner."""
    stored = StoredBytes(transaction.most_stored_bytes)
    stored.load(transaction.stored_bytes(ALL, new.owner))
    all_jobs = transaction.counts(new.function, ALL)
    own = transaction.counts(new.function, new.owner) if new.owner else JobCounts()
    check_room(new, stored, all_jobs, own)


def take(transaction: Transaction, job_id: str, worker: str = "") -> int | None:
    row = transaction.row(job_id)
    if row is None:
        return None
    if row["state"] == JobState.IN_QUEUE and row["incarnation"] not in ("", transaction.incarnation):
        return None
    if row["state"] != JobState.IN_QUEUE:
        own = (JobState.IN_PROGRESS, transaction.incarnation, worker)
        return int(row["attempts"]) if (row["state"], row["incarnation"], row["worker"]) == own else None
    transaction.move(row, JobState.IN_PROGRESS, worker=worker)
    transaction.notify(row, "start")
    return int(row["attempts"]) + 1


def finish(transaction: Transaction, job_id: str, fence: int, outcome: JobOutcome) -> bool:
    if not outcome.state.final:
        raise JobConflict(f"A job cannot end as {outcome.state}.")
    row = transaction.running_row(job_id, fence) or _given_up(transaction, job_id, fence)
    if row is None:
        return _has_ended(transaction, job_id, fence, outcome)
    transaction.end(row, outcome)
    return True


def _given_up(transaction: Transaction, job_id: str, fence: int) -> SqlRow | None:
    """If `requeue_dead` has queued the job because its gateway seemed to be dead, continue the attempt `fence`, and
    return the job's row. Otherwise, return None.
    """
    row = transaction.row(job_id)
    if row is None or (row["state"], row["attempts"]) != (JobState.IN_QUEUE, fence) or not row["worker"]:
        return None
    transaction.move(row, JobState.IN_PROGRESS, attempts=fence)
    return transaction.row(job_id)


def _has_ended(transaction: Transaction, job_id: str, fence: int, outcome: JobOutcome) -> bool:
    """Return True if the attempt `fence` has ended the job with this outcome."""
    row = transaction.row(job_id, SELECT_WITH_RESULT)
    if row is None or (row["attempts"], row["error"]) != (fence, error_text(outcome)):
        return False
    job = _kept(transaction, row)
    same = same_body(job.large_output, outcome.large_output)
    output = outcome.output if outcome.large_output else job.output
    ended = JobOutcome(job.state, output, job.output_type, outcome.error, job.logs, job.metrics)
    return same and ended == replace(outcome, large_output="")


def requeue(
    transaction: Transaction, job_id: str, fence: int, failure: JobOutcome, delay_s: float, *, counted: bool
) -> bool:
    row = transaction.running_row(job_id, fence)
    if row is None:
        return False
    if counted and row["attempts"] >= row["max_attempts"]:
        transaction.end(row, failure)
    else:
        due_s = transaction.now_s + delay_s if delay_s > 0 else 0.0
        max_attempts = row["max_attempts"] + (0 if counted else 1)
        fields = {"due_s": due_s, "error": error_text(failure), "max_attempts": max_attempts}
        transaction.move(row, JobState.IN_QUEUE, **fields)
    return True


def requeue_dead(transaction: Transaction, alive: Collection[str]) -> tuple[int, int]:
    """Queue or end the running jobs of all gateways that are not in `alive`. Return how many were queued, and how many
    ended. `alive` contains the incarnations of all gateways that may run jobs.
    """
    dead = f"incarnation NOT IN ({', '.join('?' * len(alive))})"
    running, again = find_rows(transaction.connection, f"WHERE state = 'IN_PROGRESS' AND {dead}", *alive), 0
    for row in running:
        if row["attempts"] < row["max_attempts"]:
            # The move deletes the stored pieces. Only if there were none, the interrupted attempt may still `finish`.
            # `_given_up` reads this from the column `worker`.
            transaction.move(row, JobState.IN_QUEUE, worker="" if row["pieces"] else row["worker"])
            again += 1
            continue
        error = WorkerDied(
            f"The gateway ended during attempt {row['attempts']} of {row['max_attempts']}.",
            remedy="Look in the function's logs for the cause, then retry the job.",
        )
        transaction.end(row, JobOutcome(JobState.FAILED, error=error.to_wire()))
    return again, len(running) - again


def give_up(transaction: Transaction, job_id: str, outcome: JobOutcome) -> None:
    """End a queued job that cannot be run."""
    row = transaction.row(job_id)
    if row is not None and row["state"] == JobState.IN_QUEUE:
        transaction.end(row, outcome)


def add_pieces(
    transaction: Transaction, job_id: str, fence: int, first_number: int, pieces: Sequence[bytes]
) -> bool:
    row = transaction.running_row(job_id, fence)
    if row is None:
        return False
    if not 1 <= first_number <= row["pieces"] + 1:
        raise JobConflict(f"Job {job_id} has {row['pieces']} pieces: number {first_number} cannot follow.")
    numbered = [(row["number"], first_number + index, piece) for index, piece in enumerate(pieces)]
    new = numbered[row["pieces"] + 1 - first_number :]
    if new:
        transaction.insert_pieces(new)
        size = sum(len(piece) for _, _, piece in new)
        transaction.count_bytes(row["owner"], size)
        transaction.touch(row, pieces=new[-1][1], result_size=row["result_size"] + size)
    return True


def set_progress(transaction: Transaction, job_id: str, fence: int, progress: bytes) -> bool:
    row = transaction.running_row(job_id, fence)
    if row is not None:
        transaction.touch(row, progress=progress)
    return row is not None


def tell_logs(transaction: Transaction, job_id: str, fence: int, logs: str) -> bool:
    row = transaction.running_row(job_id, fence)
    if row is not None:
        transaction.notify(row, "logs", logs)
    return row is not None


def cancel(transaction: Transaction, function: str, job_id: str, owner: str = ALL) -> Job:
    row = row_of(transaction.connection, function, job_id, owner)
    if not JobState(row["state"]).final:
        transaction.end(row, JobOutcome(JobState.CANCELLED))
    return read_job(transaction.connection, row["number"], SELECT_WHOLE)


def retry(transaction: Transaction, function: str, job_id: str, owner: str = ALL) -> Job:
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

    If `running` is True, this includes running jobs. If there are none left, forbid the retry of up to PURGE_SLICE
    ended jobs, and return how many. Otherwise, a retry would run them on the next function of this name, which may
    have another owner.
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
    transaction.changes.notified = True
    return outbox.redeliver(transaction.connection, function, delivery_id, transaction.now_s, owner)


def alert(transaction: Transaction, alert: Alert) -> None:
    outbox.add_alert(transaction.connection, alert, transaction.now_s)
    transaction.changes.notified = True
    if alert.begun:
        values = (alert.function, alert.condition, transaction.now_s)
        transaction.connection.execute(_BEGUN, values)
    else:
        drop_alerts(transaction, alert.function, (alert.condition,))


def drop_alerts(transaction: Transaction, function: str, conditions: Collection[str]) -> None:
    for condition in conditions:
        drop = "DELETE FROM alerts WHERE function = ? AND condition = ?"
        transaction.connection.execute(drop, (function, condition))


def expire(transaction: Transaction, limit: int = 200) -> int:
    """End queued jobs after their ttl, and delete old jobs, tombstones, and deliveries of deleted jobs.

    One call handles at most `limit` jobs and `limit` tombstones.
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
    return done + deleted


def next_expiry(connection: SqlConnection) -> float:
    first = connection.execute("SELECT until_s FROM jobs WHERE until_s IS NOT NULL ORDER BY until_s LIMIT 1")
    oldest = connection.execute("SELECT until_s FROM tombstones ORDER BY number LIMIT 1")
    return min((until_s for (until_s,) in (*first, *oldest)), default=math.inf)


def _delete(transaction: Transaction, row: SqlRow) -> None:
    """Delete a job and its ended webhook deliveries, and add a tombstone. Pending deliveries are kept.

    If a pending delivery needs the job's large bodies, which are not in the delivery, keep the job for UNSENT_S more.
    """
    execute, number = transaction.connection.execute, (row["number"],)
    if row["webhook"] is not None and outbox.needs_job(transaction.connection, row["id"]):
        execute("UPDATE jobs SET until_s = ? WHERE number = ?", (transaction.now_s + UNSENT_S, *number))
        return
    transaction.count_bytes(row["owner"], -row["size"] - row["result_size"])
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

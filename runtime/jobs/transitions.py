"""The changes of jobs: each runs within one turn of the writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from ...errors import IdempotencyConflict, JobConflict, QueueFull, WorkerDied
from . import counters, rows
from .identity import idempotency_digest, new_job_id
from .job import Job, JobOutcome, JobState, NewJob
from .transaction import Transaction

PURGE_SLICE = 500
"""Jobs cancelled in one turn, so that nobody else waits for long to write."""


def submit(turn: Transaction, new: NewJob) -> tuple[Job, bool]:
    """A new job, or the one that was submitted with the same idempotency key (and True)."""
    found = _submitted(turn, new) if new.idempotency else None
    if found is not None:
        return found, True
    if new.wanted_id and rows.row(turn.connection, new.wanted_id) is not None:
        raise JobConflict(f"There is another job {new.wanted_id!r}.", remedy="Choose another id.")
    _check_room(turn, new)
    job = rows.insert(turn.connection, new, new.wanted_id or new_job_id(turn.now_s), turn.now_s)
    counters.arrived(turn.connection, new.function, len(new.input))
    turn.wakes.add(new.function)
    return job, False


def _submitted(turn: Transaction, new: NewJob) -> Job | None:
    digest = idempotency_digest(new.function, new.owner, new.idempotency)
    row = turn.connection.execute(rows.WHOLE + "WHERE idempotency = ?", (digest,)).fetchone()
    if row is None:
        return None
    job = rows.job(row)
    if (job.input, job.content_type) != (new.input, new.content_type):
        raise IdempotencyConflict(
            f"Job {job.id} was submitted with the same idempotency key and another input.",
            remedy="Use a new key for a new input.",
        )
    return job


def _check_room(turn: Transaction, new: NewJob) -> None:
    """QueueFull if as much waits as may. A job that is alone may be of any size."""
    jobs, size_bytes = counters.queued(turn.connection, new.function)
    if new.max_queued is not None and jobs >= new.max_queued:
        raise QueueFull(
            f"{new.function!r} has {jobs} jobs in its queue; the limit is {new.max_queued}.",
            remedy="Try again later, or raise max_jobs or scale.max in pilotflame.toml.",
        )
    most_bytes = new.max_queued_bytes
    if most_bytes is not None and jobs and size_bytes + len(new.input) > most_bytes:
        raise QueueFull(
            f"The jobs in the queue of {new.function!r} hold {size_bytes} bytes of input; the limit is {most_bytes}.",
            remedy="Try again later, or raise max_jobs_bytes or scale.max in pilotflame.toml.",
        )


def take(turn: Transaction, job_id: str, worker: str) -> Job | None:
    """Give a queued job to a worker; None if it is not queued any more. Without its input: who takes it has it."""
    row = rows.row(turn.connection, job_id)
    if row is None or row["state"] != JobState.IN_QUEUE:
        return None
    turn.move(row, JobState.IN_PROGRESS, worker=worker)
    turn.announce(row, "start")
    return rows.numbered(turn.connection, row["number"])


def finish(turn: Transaction, job_id: str, fence: int, outcome: JobOutcome) -> Job | None:
    """How an attempt ended: the job without what may be large; None if it is no longer its job."""
    row = turn.held(job_id, fence)
    if row is None:
        return None
    turn.end(row, outcome)
    return rows.numbered(turn.connection, row["number"])


def requeue(
    turn: Transaction,
    job_id: str,
    fence: int,
    *,
    error: Mapping[str, Any] | None,
    delay_s: float,
    counted: bool,
    logs: str,
) -> Job | None:
    """Back into the queue, or FAILED if that was the last attempt; None if it is no longer its job."""
    row = turn.held(job_id, fence)
    if row is None:
        return None
    if counted and row["attempts"] >= row["max_attempts"]:
        turn.end(row, JobOutcome(JobState.FAILED, error=error, logs=logs))
        return rows.numbered(turn.connection, row["number"])
    turn.move(
        row,
        JobState.IN_QUEUE,
        due_s=turn.now_s + delay_s if delay_s > 0 else 0.0,
        error=orjson.dumps(error).decode() if error is not None else None,
        max_attempts=row["max_attempts"] + (0 if counted else 1),
    )
    return rows.numbered(turn.connection, row["number"])


def recover(turn: Transaction) -> int:
    """What ran when the gateway died: into the queue, or FAILED if that was the last attempt; how many."""
    running = turn.connection.execute(rows.SLIM + "WHERE state = 'IN_PROGRESS'").fetchall()
    for row in running:
        if row["attempts"] < row["max_attempts"]:
            turn.move(row, JobState.IN_QUEUE)
            continue
        error = WorkerDied(
            f"The gateway, or the worker with it, died during attempt {row['attempts']} of {row['max_attempts']}.",
            remedy="Look at the function's logs for what kills it, then retry the job.",
        )
        turn.end(row, JobOutcome(JobState.FAILED, error=error.to_wire()))
    return len(running)


def add_pieces(
    turn: Transaction, job_id: str, fence: int, first_number: int, pieces: Sequence[bytes]
) -> bool:
    """More of a streamed answer, numbered from 1 without gaps; what is there already is left as it is."""
    row = turn.held(job_id, fence)
    if row is None:
        return False
    if not 1 <= first_number <= row["pieces"] + 1:
        raise JobConflict(f"Job {job_id} has {row['pieces']} pieces: number {first_number} cannot follow.")
    numbered = [(row["number"], first_number + at, piece) for at, piece in enumerate(pieces)]
    new = numbered[row["pieces"] + 1 - first_number :]
    if new:
        turn.connection.executemany("INSERT INTO pieces (job, number, body) VALUES (?, ?, ?)", new)
        turn.connection.execute("UPDATE jobs SET pieces = ? WHERE number = ?", (new[-1][1], row["number"]))
        turn.changed.append(job_id)
        turn.announce(row, "output")
    return True


def set_progress(turn: Transaction, job_id: str, fence: int, progress: bytes) -> bool:
    """How far the handler says it is."""
    row = turn.held(job_id, fence)
    if row is None:
        return False
    turn.connection.execute("UPDATE jobs SET progress = ? WHERE number = ?", (progress, row["number"]))
    turn.changed.append(job_id)
    turn.announce(row, "output")
    return True


def cancel(turn: Transaction, function: str, job_id: str) -> tuple[Job, bool]:
    """The job, CANCELLED unless it had ended, and whether it was running."""
    row = turn.row_of(function, job_id)
    was = JobState(row["state"])
    if not was.final:
        turn.end(row, JobOutcome(JobState.CANCELLED))
    return rows.numbered(turn.connection, row["number"], rows.WHOLE), was is JobState.IN_PROGRESS


def retry(turn: Transaction, function: str, job_id: str) -> Job:
    """A job that failed goes back into the queue, with as many attempts as at first and its ttl from now."""
    row = turn.row_of(function, job_id)
    if row["state"] not in (JobState.FAILED, JobState.TIMED_OUT):
        raise JobConflict(
            f"Job {job_id} is {row['state']}: only jobs that FAILED or TIMED_OUT can be retried.",
            remedy="Submit its input again.",
        )
    stale_s = turn.now_s + row["ttl_s"]
    turn.move(
        row,
        JobState.IN_QUEUE,
        retried=True,
        error=None,
        retries=row["retries"] + 1,
        max_attempts=row["attempts"] + row["allowed"],
        stale_s=stale_s,
        until_s=stale_s,
    )
    return rows.numbered(turn.connection, row["number"], rows.WHOLE)


def purge(turn: Transaction, function: str, last: int) -> int:
    """Cancel some of the queued jobs that have a number of at most `last`; 0 if there are none left."""
    queued = turn.connection.execute(
        rows.SLIM + "WHERE function = ? AND state = 'IN_QUEUE' AND jobs.number <= ? LIMIT ?",
        (function, last, PURGE_SLICE),
    ).fetchall()
    for row in queued:
        turn.end(row, JobOutcome(JobState.CANCELLED))
    return len(queued)

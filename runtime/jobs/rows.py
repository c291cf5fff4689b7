"""Rows: a job as the tables hold it, and back."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

import orjson

from .identity import idempotency_digest
from .job import Job, JobState, NewJob, Webhook

_FIELDS = (
    "jobs.number, id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, max_attempts, "
    "attempts, retries, created_s, started_s, ended_s, due_s, expires_s, worker, error, progress, pieces, webhook, "
    "traceparent, extra, allowed, stale_s, "
)
_JOINS = "FROM jobs LEFT JOIN inputs ON inputs.number = jobs.number LEFT JOIN results ON results.number = jobs.number"

WHOLE = f"SELECT {_FIELDS} inputs.body AS input, results.body AS output, type AS output_type, logs {_JOINS} "
"""Followed by a WHERE: jobs with their input and output."""
SLIM = f"SELECT {_FIELDS} x'' AS input, NULL AS output, '' AS output_type, '' AS logs FROM jobs "  # noqa: S608  our names
"""Followed by a WHERE: jobs without what may be large."""

TOLD = (
    f"SELECT {_FIELDS} x'' AS input, results.body AS output, type AS output_type, logs FROM jobs "  # noqa: S608  our names
    "LEFT JOIN results ON results.number = jobs.number "
)
"""Followed by a WHERE: jobs with what came of them, without what they were given."""

_INSERT = """
INSERT INTO jobs (id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, allowed,
    max_attempts, created_s, stale_s, until_s, webhook, traceparent, extra, idempotency)
VALUES (?, ?, 'IN_QUEUE', ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


def insert(connection: sqlite3.Connection, new: NewJob, job_id: str, now_s: float) -> Job:
    """Put a new job into the queue."""
    stale_s = now_s + new.ttl_s
    cursor = connection.execute(_INSERT, (
        job_id, new.function, new.owner, new.priority, new.content_type, new.execution_timeout_s, new.ttl_s,
        new.max_attempts, new.max_attempts, now_s, stale_s, stale_s, _from_webhook(new.webhook), new.traceparent,
        orjson.dumps(new.extra).decode() if new.extra else None,
        idempotency_digest(new.function, new.owner, new.idempotency),
    ))  # fmt: skip
    connection.execute("INSERT INTO inputs VALUES (?, ?)", (cursor.lastrowid, new.input))
    return Job(
        job_id, new.function, JobState.IN_QUEUE, new.input, new.content_type, new.owner, new.priority,
        new.execution_timeout_s, new.ttl_s, new.max_attempts, now_s,
        webhook=new.webhook, traceparent=new.traceparent, extra=new.extra or None,
    )  # fmt: skip


def row(connection: sqlite3.Connection, job_id: str, select: str = SLIM) -> sqlite3.Row | None:
    """A job's row; if not said otherwise, without what may be large."""
    try:
        found: sqlite3.Row | None = connection.execute(select + "WHERE id = ?", (job_id,)).fetchone()
    except UnicodeEncodeError:  # an address may hold what is no text, and so no id
        return None
    return found


def numbered(connection: sqlite3.Connection, number: int, select: str = SLIM) -> Job:
    """A job that is there; if not said otherwise, without what may be large."""
    return job(connection.execute(select + "WHERE jobs.number = ?", (number,)).fetchone())


def events(row: sqlite3.Row) -> Sequence[str]:
    """What the job's webhook asked to be told of."""
    webhook = _to_webhook(row["webhook"])
    return webhook.events if webhook is not None else ()


def jobs(rows: Sequence[sqlite3.Row]) -> list[Job]:
    return [job(row) for row in rows]


def job(row: sqlite3.Row) -> Job:
    """The job of a row of WHOLE or SLIM."""
    return Job(
        id=row["id"],
        function=row["function"],
        state=JobState(row["state"]),
        input=row["input"],
        content_type=row["content_type"],
        owner=row["owner"],
        priority=row["priority"],
        execution_timeout_s=row["execution_timeout_s"],
        ttl_s=row["ttl_s"],
        max_attempts=row["max_attempts"],
        created_s=row["created_s"],
        attempts=row["attempts"],
        retries=row["retries"],
        started_s=row["started_s"],
        ended_s=row["ended_s"],
        due_s=row["due_s"],
        worker=row["worker"],
        output=row["output"],
        output_type=row["output_type"] or "",
        error=orjson.loads(row["error"]) if row["error"] is not None else None,
        progress=row["progress"],
        logs=row["logs"] or "",
        pieces=row["pieces"],
        webhook=_to_webhook(row["webhook"]),
        traceparent=row["traceparent"],
        extra=orjson.loads(row["extra"]) if row["extra"] is not None else None,
        expires_s=row["expires_s"],
    )


def _from_webhook(webhook: Webhook | None) -> str | None:
    if webhook is None:
        return None
    return orjson.dumps({"url": webhook.url, "events": webhook.events}).decode()


def _to_webhook(text: str | None) -> Webhook | None:
    if text is None:
        return None
    kept = orjson.loads(text)
    return Webhook(kept["url"], tuple(kept["events"]))

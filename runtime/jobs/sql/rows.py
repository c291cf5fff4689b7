"""Converts rows to jobs and back.

A row of `jobs` is rewritten at each change of state. So rows are small: the input, result and streamed pieces are in
other tables. `jobs.number` increases in the order of arrival. `expire` handles a row at `until_s`. For a queued job,
this is the end of its ttl; for a final job, the end of its retention; for a running job, NULL.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import orjson

from ...ground.access.keys import ALL
from ..stored.job import (
    SHARED_FIELDS,
    Job,
    JobCounts,
    JobOutcome,
    JobState,
    NewJob,
    Webhook,
    idempotency_digest,
)
from .connection import SqlConnection, SqlRow

_COLUMNS = (
    "jobs.number, id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, max_attempts, "
    "attempts, retries, created_s, started_s, ended_s, due_s, expires_s, worker, error, progress, pieces, webhook, "
    "traceparent, extra, allowed, stale_s, source, incarnation, size, result_size"
)
_RESULT = (
    "results.body AS output, type AS output_type, logs, metrics, results.large AS large_output "
    "FROM jobs LEFT JOIN results ON results.number = jobs.number"
)
# Callers append a WHERE clause to these queries. The columns and joins are constants, so the SQL is safe.
SELECT_WHOLE = (
    f"SELECT {_COLUMNS}, inputs.body AS input, inputs.large AS large_input, {_RESULT} "
    "LEFT JOIN inputs ON inputs.number = jobs.number "
)
SELECT_WITH_RESULT = f"SELECT {_COLUMNS}, zeroblob(0) AS input, '' AS large_input, {_RESULT} "
SELECT_WITHOUT_BODIES = (
    f"SELECT {_COLUMNS}, zeroblob(0) AS input, '' AS large_input, NULL AS output, '' AS output_type, NULL AS logs, "  # noqa: S608
    "NULL AS metrics, '' AS large_output FROM jobs "
)
COUNTS = "in_queue, in_progress, completed, failed, cancelled, retried, queued_bytes"
_JOB_FIELDS = tuple(field.name for field in dataclasses.fields(Job))
_PLAIN_FIELDS = tuple(name for name in SHARED_FIELDS if name not in ("input", "webhook"))


def columns_of(new: NewJob, job: Job, **more: Any) -> dict[str, Any]:
    """Return the columns of a new job, except its number and the columns that have their default. `more` sets and
    overrides columns.
    """
    columns: dict[str, Any] = {name: getattr(new, name) for name in _PLAIN_FIELDS}
    stale_s = job.created_s + new.ttl_s
    return columns | {
        "id": job.id,
        "state": job.state.value,
        "created_s": job.created_s,
        "allowed": new.max_attempts,
        "stale_s": stale_s,
        "until_s": stale_s,
        "webhook": orjson.dumps(new.webhook).decode() if new.webhook is not None else None,
        "size": len(new.input),
        "extra": orjson.dumps(new.extra).decode() if new.extra else None,
        "idempotency": idempotency_digest(new.function, new.owner, new.idempotency),
        **more,
    }


def insert_job(connection: SqlConnection, new: NewJob, job: Job, **more: Any) -> int | None:
    """Insert a new job and its input, with the columns in `more`. Return its row number, or None if there is a job with its id or
    its idempotency key.
    """
    columns = columns_of(new, job, **more)
    columns_text, marks = ", ".join(columns), ", ".join("?" * len(columns))
    insert = f"INSERT INTO jobs ({columns_text}) VALUES ({marks}) ON CONFLICT DO NOTHING"  # noqa: S608
    if (number := connection.insert(insert, tuple(columns.values()))) is None:
        return None
    if new.large_input:
        large = (number, new.large_input)
        connection.execute("INSERT INTO inputs (number, body, large) VALUES (?, zeroblob(0), ?)", large)
    else:
        connection.execute("INSERT INTO inputs (number, body) VALUES (?, ?)", (number, new.input))
    return number


def error_text(outcome: JobOutcome) -> str | None:
    """Return the value of the column `error`."""
    return orjson.dumps(outcome.error).decode() if outcome.error is not None else None


def large_bodies(connection: SqlConnection, number: int | None = None, *tables: str) -> list[str]:
    """Return the names of the large bodies in `tables`, by default inputs and results, of one job or of all jobs."""
    names: list[str] = []
    for table in tables or ("inputs", "results"):
        where, values = ("AND number = ?", (number,)) if number is not None else ("", ())
        query = f"SELECT large FROM {table} WHERE large <> '' {where}"  # noqa: S608
        names += [name for (name,) in connection.execute(query, values)]
    return names


def counts(connection: SqlConnection, function: str, owner: str = ALL) -> JobCounts:
    query = f"SELECT {COUNTS} FROM counters WHERE function = ? AND owner = ?"  # noqa: S608
    return JobCounts(*connection.execute(query, (function, owner)).fetchone() or ())


def stored_bytes(connection: SqlConnection, *owners: str) -> dict[str, int]:
    where = f"WHERE owner IN ({', '.join('?' * len(owners))})" if owners else ""
    rows = connection.execute(f"SELECT owner, bytes FROM stored {where}", owners)  # noqa: S608
    return {row["owner"]: row["bytes"] for row in rows}


def find_row(connection: SqlConnection, job_id: str, select: str = SELECT_WITHOUT_BODIES) -> SqlRow | None:
    """Return the row of the job with this id, or None. `select` is one of the queries above."""
    # An id from a URL may contain NUL, or bytes that are not UTF-8. No stored id contains them, so there is no such job.
    if "\0" in job_id:
        return None
    with suppress(UnicodeEncodeError):
        return connection.execute(select + "WHERE id = ?", (job_id,)).fetchone()
    return None


def find_rows(connection: SqlConnection, where: str, *values: object) -> list[SqlRow]:
    """Return the rows of the jobs, without input, output and logs. `where` is the query from WHERE on."""
    return connection.execute(SELECT_WITHOUT_BODIES + where, values).fetchall()


def read_job(connection: SqlConnection, number: int, select: str) -> Job:
    """Return the job with a row number that is known to exist. `select` is one of the queries above."""
    return job_of(connection.execute(select + "WHERE jobs.number = ?", (number,)).fetchone())


def read_jobs(connection: SqlConnection, numbers: Sequence[int]) -> list[Job]:
    """Return the jobs with these row numbers, which are known to exist, in this order."""
    if not numbers:
        return []
    query = f"{SELECT_WHOLE} WHERE jobs.number IN ({', '.join('?' * len(numbers))})"
    found = {row["number"]: job_of(row) for row in connection.execute(query, numbers)}
    return [found[number] for number in numbers]


def job_of(row: SqlRow) -> Job:
    """Convert a row of one of the queries above to a job."""
    fields = {name: row[name] for name in _JOB_FIELDS}
    fields["state"] = JobState(fields["state"])
    fields["logs"] = (fields["logs"] or b"").decode()
    for name in ("output_type", "large_output"):
        fields[name] = fields[name] or ""
    fields["webhook"] = webhook_of(row)
    for name in ("error", "extra"):
        fields[name] = orjson.loads(fields[name]) if fields[name] is not None else None
    return Job(**fields)


def webhook_of(row: SqlRow) -> Webhook | None:
    if row["webhook"] is None:
        return None
    fields = orjson.loads(row["webhook"])
    return Webhook(fields["url"], tuple(fields["events"]), fields.get("form", ""))

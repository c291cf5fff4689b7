"""Defines the tables of the jobs database, its upgrade scripts, and the conversion of rows to jobs and back.

A row of `jobs` is rewritten at each change of state. So rows are small: the input, result and streamed pieces are in
other tables. `jobs.number` increases in the order of arrival. `expire` handles a row at `until_s`. For a queued job,
this is the end of its ttl; for a final job, the end of its retention; for a running job, NULL.
"""

from __future__ import annotations

import dataclasses
import sqlite3
from contextlib import suppress
from typing import Any

import orjson

from ..stored.job import SHARED_FIELDS, Job, JobOutcome, JobState, NewJob, Webhook, idempotency_digest

_TABLES = """
CREATE TABLE jobs (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    function TEXT NOT NULL,
    state TEXT NOT NULL,
    owner TEXT NOT NULL,
    priority INTEGER NOT NULL,
    content_type TEXT NOT NULL,
    execution_timeout_s REAL NOT NULL,
    ttl_s REAL NOT NULL,
    allowed INTEGER NOT NULL,        -- attempts that the caller allowed; a retry adds as many again. 0: no retry
    max_attempts INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    retries INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    started_s REAL NOT NULL DEFAULT 0,
    ended_s REAL NOT NULL DEFAULT 0,
    due_s REAL NOT NULL DEFAULT 0,   -- 0: now
    stale_s REAL NOT NULL,           -- the end of its ttl
    until_s REAL,
    expires_s REAL NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',
    error TEXT,                      -- JSON
    progress BLOB,
    pieces INTEGER NOT NULL DEFAULT 0,
    webhook TEXT,                    -- JSON
    traceparent TEXT NOT NULL,
    extra TEXT,                      -- JSON
    idempotency BLOB,                -- a digest of function, owner and key; NULL without a key
    source TEXT NOT NULL DEFAULT 'job'  -- the submitter: "job" (a caller), "queue" or "batch"
);
CREATE INDEX jobs_state ON jobs (function, state);
-- The owners of jobs take turns.
CREATE INDEX jobs_ready ON jobs (function, priority, owner, number) WHERE state = 'IN_QUEUE' AND due_s = 0;
CREATE INDEX jobs_delayed ON jobs (function, due_s) WHERE state = 'IN_QUEUE' AND due_s > 0;
CREATE INDEX jobs_running ON jobs (number) WHERE state = 'IN_PROGRESS';
CREATE INDEX jobs_until ON jobs (until_s) WHERE until_s IS NOT NULL;
-- Jobs without an owner have no entry in the indexes of owners.
CREATE INDEX jobs_owner ON jobs (function, owner, state) WHERE owner <> '';
CREATE UNIQUE INDEX jobs_idempotency ON jobs (idempotency) WHERE idempotency IS NOT NULL;

-- `large` has the names of large bodies, which are files; see large_bodies.py.
CREATE TABLE inputs (number INTEGER PRIMARY KEY, body BLOB NOT NULL, large TEXT NOT NULL DEFAULT '');
CREATE TABLE results (
    number INTEGER PRIMARY KEY, type TEXT NOT NULL, logs TEXT NOT NULL, body BLOB,
    metrics BLOB,  -- the metrics that handlers report
    large TEXT NOT NULL DEFAULT ''
);
CREATE INDEX inputs_large ON inputs (large) WHERE large <> '';
CREATE INDEX results_large ON results (large) WHERE large <> '';
-- pieces.job is jobs.number.
CREATE TABLE pieces (job INTEGER NOT NULL, number INTEGER NOT NULL, body BLOB NOT NULL, UNIQUE (job, number));

-- The row with the owner '*' counts all jobs of a function. Jobs without an owner are counted in no other row.
CREATE TABLE counters (
    function TEXT NOT NULL,
    owner TEXT NOT NULL,
    in_queue INTEGER NOT NULL DEFAULT 0,
    in_progress INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    retried INTEGER NOT NULL DEFAULT 0,
    queued_bytes INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (function, owner)
) WITHOUT ROWID;

-- The bytes of inputs, results and pieces. The row with the owner '*' counts all jobs.
CREATE TABLE stored (owner TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO stored VALUES ('*', 0);

-- The key is a digest of the id of a deleted job: callers may choose ids of 128 characters.
CREATE TABLE tombstones (
    number INTEGER PRIMARY KEY, key INTEGER NOT NULL, until_s REAL NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX tombstones_key ON tombstones (key);

CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    subject TEXT NOT NULL,          -- a job or an alert
    function TEXT NOT NULL,
    event TEXT NOT NULL,
    url TEXT NOT NULL,
    host TEXT NOT NULL,             -- scheme, name and port of the url
    body BLOB NOT NULL,
    state TEXT NOT NULL,            -- PENDING, DELIVERED, DEAD
    attempts INTEGER NOT NULL,
    next_s REAL NOT NULL,
    created_s REAL NOT NULL,
    last_status INTEGER NOT NULL,   -- 0: no response
    last_error TEXT NOT NULL,
    log TEXT NOT NULL,              -- JSON: the last attempts
    owner TEXT NOT NULL DEFAULT ''
);
-- The owners of deliveries come before their hosts, so that the hosts of one owner hide no other owner.
CREATE INDEX deliveries_turns ON deliveries (owner, host, next_s) WHERE state = 'PENDING';
CREATE INDEX deliveries_next ON deliveries (next_s, owner) WHERE state = 'PENDING';
CREATE INDEX deliveries_pending ON deliveries (function) WHERE state = 'PENDING';
CREATE INDEX deliveries_owner ON deliveries (function, owner, created_s) WHERE owner <> '';
CREATE INDEX deliveries_ended ON deliveries (created_s) WHERE state <> 'PENDING';
CREATE INDEX deliveries_job ON deliveries (subject);
CREATE INDEX deliveries_function ON deliveries (function, created_s);

-- The conditions whose beginning was sent and whose end was not.
CREATE TABLE alerts (
    function TEXT NOT NULL, condition TEXT NOT NULL, begun_s REAL NOT NULL, PRIMARY KEY (function, condition)
) WITHOUT ROWID;
"""

_INCARNATION = """
-- The run of the gateway that runs the job; '' while it is queued.
ALTER TABLE jobs ADD COLUMN incarnation TEXT NOT NULL DEFAULT '';
"""

SCRIPTS = (*("",) * 11, _TABLES, _INCARNATION)
"""`SCRIPTS[n]` upgrades a file from version n to n + 1. Do not edit a released script: add a new one. No release has
written a file of a version below 12.
"""

# The length of a text ends at its first NUL character.
_SIZE_OF_RESULT = "coalesce(length(body), 0) + length(CAST(logs AS BLOB)) + coalesce(length(metrics), 0)"
_COLUMNS = (
    "jobs.number, id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, max_attempts, "
    "attempts, retries, created_s, started_s, ended_s, due_s, expires_s, worker, error, progress, pieces, webhook, "
    "traceparent, extra, allowed, stale_s, source, incarnation"
)
_RESULT = (
    "results.body AS output, type AS output_type, logs, metrics, results.large AS large_output "
    "FROM jobs LEFT JOIN results ON results.number = jobs.number"
)
SIZE_OF_INPUT = "length(body) + CAST(large AS INTEGER)"
"""The bytes of a row of `inputs`. SQLite knows the length of a blob without reading it, and a file's name begins with its size."""

# Callers append a WHERE clause to these queries. The columns and joins are constants, so the SQL is safe.
SELECT_WHOLE = (
    f"SELECT {_COLUMNS}, inputs.body AS input, inputs.large AS large_input, {_RESULT} "
    "LEFT JOIN inputs ON inputs.number = jobs.number "
)
SELECT_WITH_RESULT = f"SELECT {_COLUMNS}, x'' AS input, '' AS large_input, {_RESULT} "
SELECT_WITHOUT_BODIES = (
    f"SELECT {_COLUMNS}, x'' AS input, '' AS large_input, NULL AS output, '' AS output_type, '' AS logs, "  # noqa: S608
    "NULL AS metrics, '' AS large_output FROM jobs "
)
_JOB_FIELDS = tuple(field.name for field in dataclasses.fields(Job))
_PLAIN_FIELDS = tuple(name for name in SHARED_FIELDS if name not in ("input", "webhook"))


def insert_job(connection: sqlite3.Connection, new: NewJob, job: Job, **more: Any) -> int:
    """Insert a new job and its input, with the columns in `more`. Return its row number."""
    columns: dict[str, Any] = {name: getattr(new, name) for name in _PLAIN_FIELDS}
    stale_s = job.created_s + new.ttl_s
    columns |= {
        "id": job.id,
        "state": job.state.value,
        "created_s": job.created_s,
        "allowed": new.max_attempts,
        "stale_s": stale_s,
        "until_s": stale_s,
        "webhook": orjson.dumps(new.webhook).decode() if new.webhook is not None else None,
        "extra": orjson.dumps(new.extra).decode() if new.extra else None,
        "idempotency": idempotency_digest(new.function, new.owner, new.idempotency),
        **more,
    }
    marks = ", ".join("?" * len(columns))
    insert = f"INSERT INTO jobs ({', '.join(columns)}) VALUES ({marks})"  # noqa: S608
    number = connection.execute(insert, tuple(columns.values())).lastrowid
    if new.large_input:
        large = (number, new.large_input)
        connection.execute("INSERT INTO inputs (number, body, large) VALUES (?, x'', ?)", large)
    else:
        connection.execute("INSERT INTO inputs (number, body) VALUES (?, ?)", (number, new.input))
    return number or 0


def error_text(outcome: JobOutcome) -> str | None:
    """Return the column `error`."""
    return orjson.dumps(outcome.error).decode() if outcome.error is not None else None


def size_of_result(connection: sqlite3.Connection, number: int) -> int:
    """Return the bytes of a job's result and pieces. This reads no bodies, because SQLite knows the length of a blob."""
    size = f"{_SIZE_OF_RESULT} + CAST(large AS INTEGER)"
    query = f"""SELECT coalesce((SELECT {size} FROM results WHERE number = ?), 0)
        + (SELECT coalesce(sum(length(body)), 0) FROM pieces WHERE job = ?)"""  # noqa: S608
    return int(connection.execute(query, (number, number)).fetchone()[0])


def size_of_input(connection: sqlite3.Connection, number: int) -> int:
    query = f"SELECT coalesce((SELECT {SIZE_OF_INPUT} FROM inputs WHERE number = ?), 0)"  # noqa: S608
    return int(connection.execute(query, (number,)).fetchone()[0])


def large_bodies(connection: sqlite3.Connection, number: int | None = None, *tables: str) -> list[str]:
    """Return the names of the large bodies of a job in these tables, by default of all jobs, inputs and results."""
    names: list[str] = []
    for table in tables or ("inputs", "results"):
        where, values = ("AND number = ?", (number,)) if number is not None else ("", ())
        query = f"SELECT large FROM {table} WHERE large <> '' {where}"  # noqa: S608
        names += [name for (name,) in connection.execute(query, values)]
    return names


def stored_bytes(connection: sqlite3.Connection, *owners: str) -> dict[str, int]:
    where = f"WHERE owner IN ({', '.join('?' * len(owners))})" if owners else ""
    rows = connection.execute(f"SELECT owner, bytes FROM stored {where}", owners)  # noqa: S608
    return {row["owner"]: row["bytes"] for row in rows}


def find_row(
    connection: sqlite3.Connection, job_id: str, select: str = SELECT_WITHOUT_BODIES
) -> sqlite3.Row | None:
    """Return the row of the job with this id, or None. `select` is one of the queries above."""
    row: sqlite3.Row | None = None
    # An id from a URL may contain bytes that are not UTF-8. No stored id contains such bytes, so there is no such job.
    with suppress(UnicodeEncodeError):
        row = connection.execute(select + "WHERE id = ?", (job_id,)).fetchone()
    return row


def find_rows(connection: sqlite3.Connection, where: str, *values: object) -> list[sqlite3.Row]:
    """Return the rows of the jobs, without input, output and logs. `where` is the query from WHERE on."""
    return connection.execute(SELECT_WITHOUT_BODIES + where, values).fetchall()


def read_job(connection: sqlite3.Connection, number: int, select: str) -> Job:
    """Return the job with a row number that is known to exist. `select` is one of the queries above."""
    return job_of(connection.execute(select + "WHERE jobs.number = ?", (number,)).fetchone())


def job_of(row: sqlite3.Row) -> Job:
    """Convert a row of one of the queries above to a job."""
    fields = {name: row[name] for name in _JOB_FIELDS}
    fields["state"] = JobState(fields["state"])
    for name in ("output_type", "logs", "large_output"):
        fields[name] = fields[name] or ""
    fields["webhook"] = webhook_of(row)
    for name in ("error", "extra"):
        fields[name] = orjson.loads(fields[name]) if fields[name] is not None else None
    return Job(**fields)


def webhook_of(row: sqlite3.Row) -> Webhook | None:
    if row["webhook"] is None:
        return None
    fields = orjson.loads(row["webhook"])
    return Webhook(fields["url"], tuple(fields["events"]), fields.get("form", ""))

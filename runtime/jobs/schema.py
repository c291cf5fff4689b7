"""The tables of the database of jobs: one script for each version of the file.

A job's row is kept small, and its input, result and pieces lie in tables of their own: a row is written anew at each
change of state, which must not cost in proportion to an input of a megabyte.
`number` gives the order of arrival; `until_s` is the one time at which `expire` has to look at a row: in the queue the
end of its ttl, once it is final the end of its keeping, while it runs none.
"""

from __future__ import annotations

_JOBS = """
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
    allowed INTEGER NOT NULL,        -- attempts that the caller allowed; a retry allows as many again
    max_attempts INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    retries INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    started_s REAL NOT NULL DEFAULT 0,
    ended_s REAL NOT NULL DEFAULT 0,
    due_s REAL NOT NULL DEFAULT 0,   -- 0: at once
    stale_s REAL NOT NULL,           -- when its ttl ends
    until_s REAL,
    expires_s REAL NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',
    error TEXT,                      -- JSON
    progress BLOB,
    pieces INTEGER NOT NULL DEFAULT 0,
    webhook TEXT,                    -- JSON
    traceparent TEXT NOT NULL,
    extra TEXT,                      -- JSON
    idempotency BLOB                 -- a digest of function, owner and key; NULL without a key
);
CREATE INDEX jobs_state ON jobs (function, state);
CREATE INDEX jobs_ready ON jobs (function, priority, number) WHERE state = 'IN_QUEUE' AND due_s = 0;
CREATE INDEX jobs_delayed ON jobs (function, due_s) WHERE state = 'IN_QUEUE' AND due_s > 0;
CREATE INDEX jobs_running ON jobs (number) WHERE state = 'IN_PROGRESS';
CREATE INDEX jobs_until ON jobs (until_s) WHERE until_s IS NOT NULL;
CREATE UNIQUE INDEX jobs_idempotency ON jobs (idempotency) WHERE idempotency IS NOT NULL;

CREATE TABLE inputs (number INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE results (
    number INTEGER PRIMARY KEY,
    type TEXT NOT NULL,
    logs TEXT NOT NULL,
    body BLOB
);
CREATE TABLE pieces (
    job INTEGER NOT NULL,            -- its number
    number INTEGER NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (job, number)
);
"""

_COUNTERS = """
CREATE TABLE counters (
    function TEXT PRIMARY KEY,
    in_queue INTEGER NOT NULL DEFAULT 0,
    in_progress INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    cancelled INTEGER NOT NULL DEFAULT 0,
    retried INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""

# Ids of forgotten jobs, by a digest: 100 characters of somebody's choice would be 100 bytes for each.
_TOMBSTONES = """
CREATE TABLE tombstones (number INTEGER PRIMARY KEY, key INTEGER NOT NULL, until_s REAL NOT NULL);
CREATE INDEX tombstones_key ON tombstones (key);
"""

_DELIVERIES = """
CREATE TABLE deliveries (
    id TEXT PRIMARY KEY,
    job_id TEXT NOT NULL,
    function TEXT NOT NULL,
    event TEXT NOT NULL,
    url TEXT NOT NULL,
    host TEXT NOT NULL,             -- scheme, name and port of the url: who may be slow
    body BLOB NOT NULL,
    state TEXT NOT NULL,            -- PENDING, DELIVERED, DEAD
    attempts INTEGER NOT NULL,
    next_s REAL NOT NULL,
    created_s REAL NOT NULL,
    last_status INTEGER NOT NULL,   -- 0: none came
    last_error TEXT NOT NULL,
    log TEXT NOT NULL               -- JSON: the last attempts
);
CREATE INDEX deliveries_due ON deliveries (host, next_s) WHERE state = 'PENDING';
CREATE INDEX deliveries_ended ON deliveries (created_s) WHERE state <> 'PENDING';
CREATE INDEX deliveries_job ON deliveries (job_id);
CREATE INDEX deliveries_function ON deliveries (function, created_s);
"""

# How large the inputs of a function's queue are together: with what is in it already.
_QUEUED_BYTES = """
ALTER TABLE counters ADD COLUMN queued_bytes INTEGER NOT NULL DEFAULT 0;
UPDATE counters SET queued_bytes = (
    SELECT coalesce(sum(length(body)), 0) FROM jobs JOIN inputs ON inputs.number = jobs.number
    WHERE jobs.function = counters.function AND state = 'IN_QUEUE'
);
"""

SCRIPTS = (_JOBS + _COUNTERS + _TOMBSTONES + _DELIVERIES, _QUEUED_BYTES)
"""`SCRIPTS[n]` brings a file from version n to n + 1. What has been released is never edited."""

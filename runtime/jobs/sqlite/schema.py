"""Defines the tables of the jobs database, and its upgrade scripts."""

from __future__ import annotations

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

_SIZES = """
-- The bytes of the job's input, and of its result and pieces.
ALTER TABLE jobs ADD COLUMN size INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN result_size INTEGER NOT NULL DEFAULT 0;
-- The name of a large body begins with its size. The length of a text ends at its first NUL character.
UPDATE jobs SET size = coalesce(
    (SELECT length(body) + CAST(large AS INTEGER) FROM inputs WHERE inputs.number = jobs.number), 0);
UPDATE jobs SET result_size = coalesce(
    (SELECT coalesce(length(body), 0) + length(CAST(logs AS BLOB)) + coalesce(length(metrics), 0) + CAST(large AS INTEGER)
        FROM results WHERE results.number = jobs.number), 0)
    + (SELECT coalesce(sum(length(body)), 0) FROM pieces WHERE job = jobs.number);
-- Logs may have NUL characters, and the texts of other databases cannot.
UPDATE results SET logs = CAST(logs AS BLOB);
"""

SCRIPTS = (*("",) * 11, _TABLES, _INCARNATION, _SIZES)
"""`SCRIPTS[n]` upgrades a file from version n to n + 1. Do not edit a released script: add a new one. No release has
written a file of a version below 12.
"""

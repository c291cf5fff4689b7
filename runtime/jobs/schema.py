"""The tables of the jobs' database: `SCRIPTS[n]` brings it from version n to n + 1."""

from __future__ import annotations

DELIVERIES = """
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

SCRIPTS = [DELIVERIES]

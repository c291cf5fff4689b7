-- The jobs, deliveries and alerts of all gateways. jobs/sqlite/schema.py explains the columns; the differences are explained here.

-- What SQLite has, and the common statements use.
CREATE FUNCTION zeroblob(size bigint) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$ SELECT decode(repeat('00', size::integer), 'hex') $$;

-- Texts are compared by their bytes, as Python compares them. `incarnation` is the gateway that has claimed the job, or runs it.
CREATE TABLE jobs (
    number BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    id TEXT COLLATE "C" NOT NULL UNIQUE,
    function TEXT COLLATE "C" NOT NULL,
    state TEXT COLLATE "C" NOT NULL,
    owner TEXT COLLATE "C" NOT NULL,
    priority BIGINT NOT NULL,
    content_type TEXT NOT NULL,
    execution_timeout_s DOUBLE PRECISION NOT NULL,
    ttl_s DOUBLE PRECISION NOT NULL,
    allowed BIGINT NOT NULL,
    max_attempts BIGINT NOT NULL,
    attempts BIGINT NOT NULL DEFAULT 0,
    retries BIGINT NOT NULL DEFAULT 0,
    created_s DOUBLE PRECISION NOT NULL,
    started_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    ended_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    due_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    stale_s DOUBLE PRECISION NOT NULL,
    until_s DOUBLE PRECISION,
    expires_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',
    error TEXT,
    progress BYTEA,
    pieces BIGINT NOT NULL DEFAULT 0,
    webhook TEXT,
    traceparent TEXT NOT NULL,
    extra TEXT,
    idempotency BYTEA,
    source TEXT NOT NULL DEFAULT 'job',
    incarnation TEXT COLLATE "C" NOT NULL DEFAULT '',
    size BIGINT NOT NULL DEFAULT 0,
    result_size BIGINT NOT NULL DEFAULT 0
) WITH (fillfactor = 80);
CREATE INDEX jobs_state ON jobs (function, state, number);
CREATE INDEX jobs_ready ON jobs (function, priority, owner, number) WHERE state = 'IN_QUEUE' AND due_s = 0;
CREATE INDEX jobs_delayed ON jobs (function, due_s) WHERE state = 'IN_QUEUE' AND due_s > 0;
CREATE INDEX jobs_running ON jobs (number) WHERE state = 'IN_PROGRESS';
CREATE INDEX jobs_claimed ON jobs (incarnation) WHERE state = 'IN_QUEUE' AND incarnation <> '';
CREATE INDEX jobs_until ON jobs (until_s) WHERE until_s IS NOT NULL;
CREATE INDEX jobs_owner ON jobs (function, owner, state, number) WHERE owner <> '';
CREATE UNIQUE INDEX jobs_idempotency ON jobs (idempotency) WHERE idempotency IS NOT NULL;

-- Logs are bytes, because texts have no NUL characters here.
CREATE TABLE inputs (number BIGINT PRIMARY KEY, body BYTEA NOT NULL, large TEXT NOT NULL DEFAULT '');
CREATE TABLE results (
    number BIGINT PRIMARY KEY, type TEXT NOT NULL, logs BYTEA NOT NULL, body BYTEA, metrics BYTEA, large TEXT NOT NULL DEFAULT ''
);
CREATE INDEX inputs_large ON inputs (large) WHERE large <> '';
CREATE INDEX results_large ON results (large) WHERE large <> '';
CREATE TABLE pieces (job BIGINT NOT NULL, number BIGINT NOT NULL, body BYTEA NOT NULL, UNIQUE (job, number));

CREATE TABLE counters (
    function TEXT COLLATE "C" NOT NULL,
    owner TEXT COLLATE "C" NOT NULL,
    in_queue BIGINT NOT NULL DEFAULT 0,
    in_progress BIGINT NOT NULL DEFAULT 0,
    completed BIGINT NOT NULL DEFAULT 0,
    failed BIGINT NOT NULL DEFAULT 0,
    cancelled BIGINT NOT NULL DEFAULT 0,
    retried BIGINT NOT NULL DEFAULT 0,
    queued_bytes BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (function, owner)
) WITH (fillfactor = 50);
CREATE TABLE stored (owner TEXT COLLATE "C" PRIMARY KEY, bytes BIGINT NOT NULL) WITH (fillfactor = 50);
INSERT INTO stored VALUES ('*', 0);

CREATE TABLE tombstones (
    number BIGINT PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    key BIGINT NOT NULL, until_s DOUBLE PRECISION NOT NULL, owner TEXT NOT NULL DEFAULT ''
);
CREATE INDEX tombstones_key ON tombstones (key);

-- SQLite numbers rows by itself.
CREATE TABLE deliveries (
    rowid BIGINT GENERATED ALWAYS AS IDENTITY UNIQUE,
    id TEXT PRIMARY KEY,
    subject TEXT NOT NULL,
    function TEXT COLLATE "C" NOT NULL,
    event TEXT NOT NULL,
    url TEXT NOT NULL,
    host TEXT COLLATE "C" NOT NULL,
    body BYTEA NOT NULL,
    state TEXT NOT NULL,
    attempts BIGINT NOT NULL,
    next_s DOUBLE PRECISION NOT NULL,
    created_s DOUBLE PRECISION NOT NULL,
    last_status BIGINT NOT NULL,
    last_error TEXT NOT NULL,
    log TEXT NOT NULL,
    owner TEXT COLLATE "C" NOT NULL DEFAULT ''
);
CREATE INDEX deliveries_turns ON deliveries (owner, host, next_s) WHERE state = 'PENDING';
CREATE INDEX deliveries_next ON deliveries (next_s, owner) WHERE state = 'PENDING';
CREATE INDEX deliveries_pending ON deliveries (function) WHERE state = 'PENDING';
CREATE INDEX deliveries_owner ON deliveries (function, owner, created_s) WHERE owner <> '';
CREATE INDEX deliveries_ended ON deliveries (created_s) WHERE state <> 'PENDING';
CREATE INDEX deliveries_job ON deliveries (subject);
CREATE INDEX deliveries_function ON deliveries (function, created_s);

CREATE TABLE alerts (
    function TEXT NOT NULL, condition TEXT NOT NULL, begun_s DOUBLE PRECISION NOT NULL, PRIMARY KEY (function, condition)
);

-- The bytes of large bodies, in parts.
CREATE TABLE blobs (
    name TEXT COLLATE "C" NOT NULL, part BIGINT NOT NULL, bytes BYTEA NOT NULL, created TIMESTAMPTZ NOT NULL DEFAULT now(),
    PRIMARY KEY (name, part)
);
ALTER TABLE blobs ALTER COLUMN bytes SET STORAGE EXTERNAL;

-- The runs of gateways. A gateway whose lease has ended runs nothing any more.
CREATE TABLE nodes (
    incarnation TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    version TEXT NOT NULL,
    until TIMESTAMPTZ NOT NULL
);

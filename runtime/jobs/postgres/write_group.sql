-- Writes what a group of changes has changed: the new jobs $1, the changed jobs $2, the inputs $3, the results $4, the pieces $5, and what
-- is added to the counters $6 and to the stored bytes $7. All bodies are parts of $8.
WITH new_jobs AS (
    INSERT INTO jobs (
        number, id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, allowed, max_attempts, attempts, created_s,
        started_s, ended_s, stale_s, until_s, expires_s, worker, error, progress, pieces, webhook, traceparent, extra, idempotency, source,
        incarnation, size, result_size
    ) OVERRIDING SYSTEM VALUE
    SELECT
        number, id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, allowed, max_attempts, attempts, created_s,
        started_s, ended_s, stale_s, until_s, expires_s, worker, error, progress, pieces, webhook, traceparent, extra, idempotency, source,
        incarnation, size, result_size
    FROM json_populate_recordset(NULL::jobs, $1::json)
), changed_jobs AS (
    UPDATE jobs SET
        state = new.state, attempts = new.attempts, started_s = new.started_s, ended_s = new.ended_s, due_s = new.due_s,
        until_s = new.until_s, expires_s = new.expires_s, worker = new.worker, error = new.error,
        progress = coalesce(new.progress, jobs.progress), pieces = new.pieces, incarnation = new.incarnation,
        result_size = new.result_size
    FROM json_populate_recordset(NULL::jobs, $2::json) AS new
    WHERE jobs.number = new.number
), new_inputs AS (
    INSERT INTO inputs (number, body, large)
    SELECT number, substring($8::bytea FROM start FOR size), large
    FROM json_to_recordset($3::json) AS input (number bigint, start integer, size integer, large text)
), new_results AS (
    INSERT INTO results (number, type, logs, body, metrics, large)
    SELECT
        number, type, substring($8::bytea FROM logs FOR logs_size), substring($8::bytea FROM body FOR body_size),
        substring($8::bytea FROM metrics FOR metrics_size), large
    FROM json_to_recordset($4::json) AS result (
        number bigint, type text, logs integer, logs_size integer, body integer, body_size integer, metrics integer, metrics_size integer,
        large text
    )
), new_pieces AS (
    INSERT INTO pieces (job, number, body)
    SELECT job, number, substring($8::bytea FROM start FOR size)
    FROM json_to_recordset($5::json) AS piece (job bigint, number bigint, start integer, size integer)
), counted AS (
    INSERT INTO counters (function, owner, in_queue, in_progress, completed, failed, cancelled, queued_bytes)
    SELECT function, owner, in_queue, in_progress, completed, failed, cancelled, queued_bytes
    FROM json_populate_recordset(NULL::counters, $6::json)
    ON CONFLICT (function, owner) DO UPDATE SET
        in_queue = counters.in_queue + excluded.in_queue, in_progress = counters.in_progress + excluded.in_progress,
        completed = counters.completed + excluded.completed, failed = counters.failed + excluded.failed,
        cancelled = counters.cancelled + excluded.cancelled, queued_bytes = counters.queued_bytes + excluded.queued_bytes
)
INSERT INTO stored (owner, bytes)
SELECT owner, bytes FROM json_populate_recordset(NULL::stored, $7::json)
ON CONFLICT (owner) DO UPDATE SET bytes = stored.bytes + excluded.bytes

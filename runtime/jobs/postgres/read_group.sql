-- Reads what a group of changes needs, as one JSON object: the jobs with the ids $1 or the idempotency keys $2, the counters $3 of functions
-- and owners, the stored bytes of these owners, and $4 numbers for new jobs.
SELECT json_build_object(
    'jobs', (
        SELECT json_agg(job) FROM (
            SELECT number, id, function, owner, state, attempts, max_attempts, started_s, ended_s, due_s, stale_s, until_s, expires_s,
                worker, error, pieces, webhook, incarnation, size, result_size, encode(idempotency, 'hex') AS idempotency
            FROM jobs
            WHERE id = ANY (ARRAY(SELECT json_array_elements_text($1::json)))
                OR idempotency = ANY (ARRAY(SELECT decode(key, 'hex') FROM json_array_elements_text($2::json) AS key))
        ) AS job
    ),
    'counters', (
        SELECT json_agg(counted) FROM (
            SELECT function, owner, counters.in_queue, counters.in_progress, counters.completed, counters.failed, counters.cancelled,
                counters.retried, counters.queued_bytes
            FROM counters JOIN json_populate_recordset(NULL::counters, $3::json) AS asked USING (function, owner)
        ) AS counted
    ),
    'stored', (
        SELECT json_agg(stored) FROM stored
        WHERE owner IN (SELECT owner FROM json_populate_recordset(NULL::counters, $3::json))
    ),
    'numbers', (SELECT json_agg(nextval('jobs_number_seq')) FROM generate_series(1, $4::integer))
)::text

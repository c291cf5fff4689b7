-- Adds the counters of an owner's jobs of a function to those that are there.
INSERT INTO counters (function, owner, in_queue, in_progress, completed, failed, cancelled, retried, queued_bytes)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
ON CONFLICT (function, owner) DO UPDATE SET
    in_queue = counters.in_queue + excluded.in_queue, in_progress = counters.in_progress + excluded.in_progress,
    completed = counters.completed + excluded.completed, failed = counters.failed + excluded.failed,
    cancelled = counters.cancelled + excluded.cancelled, retried = counters.retried + excluded.retried,
    queued_bytes = counters.queued_bytes + excluded.queued_bytes

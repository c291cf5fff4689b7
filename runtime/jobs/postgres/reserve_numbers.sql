-- Reserves $1 numbers for jobs, and returns the number before them. The caller has the lock of writes, so no other gateway takes a number
-- meanwhile.
SELECT setval('jobs_number_seq', nextval('jobs_number_seq') + $1::bigint) - $1::bigint

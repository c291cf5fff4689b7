"""The answers of asynchronous invocations that are not written yet, in the database of two gateways."""

from __future__ import annotations

import pytest
from pilotflame.runtime.plugins.sagemaker.pending_answers import PendingAnswer, SharedAnswers
from postgres import join

postgres = pytest.importorskip("pilotflame.runtime.ground.storing.postgres")
JOB = """INSERT INTO jobs (id, function, state, owner, priority, content_type, execution_timeout_s, ttl_s, allowed, max_attempts, created_s,
stale_s, traceparent) VALUES (?, 'f', 'IN_QUEUE', '', 0, '', 1, 1, 1, 1, 0, 0, '') RETURNING id"""


def test_pending_answers_belong_to_one_gateway(postgres_url: str) -> None:
    postgres = pytest.importorskip("pilotflame.runtime.ground.storing.postgres")
    postgres.prepare_database(postgres_url)
    pool = postgres.PostgresPool(postgres_url)
    join(postgres_url, "a"), join(postgres_url, "b", alone=False)
    one, other = SharedAnswers(pool, "a"), SharedAnswers(pool, "b")
    answer = PendingAnswer(job="job-1", function="f", output="s3://o", failure="s3://f")
    one.put(answer)
    # `put` wrote nothing, because the database has no such job.
    assert one.take_over() == []
    pool.rows(JOB, answer.job)
    for _ in range(2):
        one.put(answer)
    assert (other.take_over(), one.take_over()) == ([], [answer])
    other.remove(answer.job)
    assert one.take_over() == [answer]
    pool.rows("DELETE FROM nodes WHERE incarnation = ? RETURNING name", "a")
    assert other.take_over() == [answer]
    one.remove(answer.job)
    assert other.take_over() == [answer]
    pool.rows("DELETE FROM jobs RETURNING id")
    assert other.take_over() == []
    pool.close()

"""A job: the transitions between its states, its ids, and the digests of ids and idempotency keys."""

import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.jobs.stored.job import (
    COUNTERS,
    MAX_QUEUED_BYTES,
    TRANSITIONS,
    JobCounts,
    JobOutcome,
    JobState,
    NewJob,
    idempotency_digest,
    new_job_id,
    tombstone_key,
)
from receiver import job


def test_every_state_has_transitions_and_a_counter() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert set(COUNTERS) == set(JobState)
    assert {*COUNTERS.values(), "retried", "queued_bytes"} == set(JobCounts.__slots__)


@pytest.mark.parametrize("state", JobState)
def test_a_final_state_is_left_only_by_a_retry(state: JobState) -> None:
    assert state not in TRANSITIONS[state]
    if state.final:
        assert TRANSITIONS[state] <= {JobState.IN_QUEUE}
    assert TRANSITIONS[JobState.COMPLETED] == TRANSITIONS[JobState.CANCELLED] == frozenset()


def test_every_state_can_be_reached_from_the_queue() -> None:
    reached, left = set[JobState](), [JobState.IN_QUEUE]
    while left:
        state = left.pop()
        if state not in reached:
            reached.add(state)
            left += TRANSITIONS[state]
    assert reached == set(JobState)


def test_a_new_job_has_the_limits_of_its_function() -> None:
    settings = FunctionSettings(name="tone", timeout_s=7.0, ttl_s=70.0, attempts=2, max_jobs=5)
    job = NewJob.for_function(settings, b"1", owner="key-1", ttl_s=8.0)
    assert job == NewJob(
        "tone", b"1", 7.0, 8.0, owner="key-1", max_attempts=2, max_queued=5, max_queued_bytes=MAX_QUEUED_BYTES
    )


# Includes surrogates, which headers may contain.
TEXT = st.text(st.characters(exclude_categories=()), max_size=5)


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 40))
def test_ids_sort_by_time(start_ms: int, later_ms: int) -> None:
    first, second = new_job_id(start_ms / 1000), new_job_id((start_ms + later_ms) / 1000 + 0.001)
    assert first < second
    assert re.fullmatch("job-[0-9a-f]{32}", first)


def test_ids_of_one_moment_share_only_the_time() -> None:
    ids = [new_job_id(1e9) for _ in range(1000)]
    assert len({job_id[14:] for job_id in ids}) == 1000
    assert len({job_id[:13] for job_id in ids}) == 1


def test_a_negative_time_gives_an_id() -> None:
    assert new_job_id(-5.0).startswith("job-000")


@given(st.tuples(TEXT, TEXT, TEXT), st.tuples(TEXT, TEXT, TEXT))
def test_digests_are_equal_only_for_equal_parts(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert idempotency_digest(*one[:2], one[2] + "k") is not None
    same = idempotency_digest(*one) == idempotency_digest(*other)
    assert same == (one == other or one[2] == other[2] == "")
    assert (tombstone_key(*one[:2]) == tombstone_key(*other[:2])) == (one[:2] == other[:2])


def test_an_empty_key_has_no_digest() -> None:
    assert idempotency_digest("f", "o", "") is None


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({}, {}),
        ({"progress": b"0.5"}, {"output": 0.5}),
        ({"state": JobState.COMPLETED, "progress": b"0.5", "output": b"[1]"}, {"output": [1]}),
        (
            {"state": JobState.COMPLETED, "output": b"ab", "output_type": "text/plain"},
            {"output": "YWI=", "output_type": "text/plain"},
        ),
        (
            {"state": JobState.FAILED, "error": {"message": "no"}, "pieces": 2},
            {"error": {"message": "no"}, "pieces": 2},
        ),
    ],
)
def test_a_status_has_the_output_or_the_progress_or_the_error(
    fields: dict[str, Any], shown: dict[str, Any]
) -> None:
    found = orjson.loads(orjson.dumps(job(worker="w1", **fields).status(101.0)))
    state = fields.get("state", JobState.IN_PROGRESS)
    times = {"delayTime": 1000, "executionTime": 0}
    assert found == {"id": "job-1", "status": state, "function": "f", "workerId": "w1", **times, **shown}


def test_a_job_waits_until_its_start_or_end_and_then_runs() -> None:
    times = [(0.0, 0.0), (105.0, 0.0), (105.0, 107.0), (0.0, 104.0)]
    durations = [
        job(started_s=started_s, ended_s=ended_s).durations_ms(110.0) for started_s, ended_s in times
    ]
    assert durations == [(10_000, 0), (5000, 5000), (5000, 2000), (4000, 0)]
    # If the clock was set back, no duration is negative.
    assert job(started_s=99.0).durations_ms(98.0) == (0, 0)


def test_the_size_of_an_outcome_is_that_of_its_texts() -> None:
    assert JobOutcome(JobState.COMPLETED).size_bytes == 0
    assert JobOutcome(JobState.COMPLETED, output=b"ab", logs="ü", metrics=b"abc").size_bytes == 7


def test_a_bare_job_has_no_bodies() -> None:
    bare = job(output=b"1", large_input="a", large_output="b").bare()
    assert (bare.input, bare.output, bare.large_input, bare.large_output) == (b"", None, "", "")

"""The job: which state may follow which."""

import pytest
from pilotflame.runtime.jobs.counters import COLUMNS
from pilotflame.runtime.jobs.job import TRANSITIONS, JobCounts, JobState


def test_every_state_has_its_transitions_and_its_count() -> None:
    assert set(TRANSITIONS) == set(JobState)
    assert set(COLUMNS) == set(JobState)
    assert {*COLUMNS.values(), "retried"} == set(JobCounts.__slots__)


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

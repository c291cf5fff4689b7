"""The job: which state may follow which."""

import pytest
from pilotflame.runtime.jobs.counters import COLUMNS
from pilotflame.runtime.jobs.job import TRANSITIONS, Counts, State


def test_every_state_has_its_transitions_and_its_count() -> None:
    assert set(TRANSITIONS) == set(State)
    assert set(COLUMNS) == set(State)
    assert {*COLUMNS.values(), "retried"} == set(Counts.__slots__)


@pytest.mark.parametrize("state", State)
def test_a_final_state_is_left_only_by_a_retry(state: State) -> None:
    assert state not in TRANSITIONS[state]
    if state.final:
        assert TRANSITIONS[state] <= {State.IN_QUEUE}
    assert TRANSITIONS[State.COMPLETED] == TRANSITIONS[State.CANCELLED] == frozenset()


def test_every_state_can_be_reached_from_the_queue() -> None:
    reached, left = set[State](), [State.IN_QUEUE]
    while left:
        state = left.pop()
        if state not in reached:
            reached.add(state)
            left += TRANSITIONS[state]
    assert reached == set(State)

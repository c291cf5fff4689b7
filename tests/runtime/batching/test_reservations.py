"""The promises: kept once, when they are due, to whom they were made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pilotflame.runtime.batching import reservations
from pilotflame.runtime.batching.reservations import EARLY, LATE_S, Reservations


class Beside(RuleBasedStateMachine):
    """As many promises as were made and have not passed; each caller's are kept in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.promises = Reservations()
        self.model: list[tuple[str, float, float]] = []
        self.now_s = 0.0

    @rule(body=st.sampled_from("xyz"))
    def make(self, body: str) -> None:
        self.promises.make("tenant", body.encode(), self.now_s, 2.0)
        self.model.append((body, self.now_s + 2 * (1 - EARLY), self.now_s + 2.0 + LATE_S))

    @rule(body=st.sampled_from("xyz"))
    def keep(self, body: str) -> None:
        due = [entry for entry in self.model if entry[0] == body and entry[1] <= self.now_s <= entry[2]]
        assert self.promises.keep("tenant", body.encode(), self.now_s) == bool(due)
        if due:
            self.model.remove(due[0])
        assert not self.promises.keep("another", body.encode(), self.now_s)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.model = [entry for entry in self.model if self.now_s <= entry[2]]

    @invariant()
    def agrees(self) -> None:
        assert self.promises.pending(self.now_s) == len(self.model) == len(self.promises)


TestBeside = Beside.TestCase


@given(st.floats(0.05, 60.0))
def test_who_comes_as_told_is_expected_and_who_tries_again_at_once_is_not(wait_s: float) -> None:
    made = Reservations()
    made.make("a", b"body", 10.0, wait_s)
    assert not made.keep("a", b"body", 10.001)
    assert not made.keep("a", b"other", 10.0 + wait_s)
    assert not made.keep("b", b"body", 10.0 + wait_s)
    assert made.keep("a", b"body", 10.0 + wait_s)
    assert not made.keep("a", b"body", 10.0 + wait_s)


def test_of_too_many_the_oldest_are_forgotten() -> None:
    made = Reservations()
    for number in range(reservations.MAX_PROMISES + 5):
        made.make("a", str(number).encode(), 0.0, 1.0)
    assert len(made) == reservations.MAX_PROMISES
    assert not made.keep("a", b"4", 1.0)
    assert made.keep("a", b"5", 1.0)

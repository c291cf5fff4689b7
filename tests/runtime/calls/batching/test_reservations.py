"""Reservations are used once, when they are due, by the caller they were made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pilotflame.runtime.calls.batching import reservations
from pilotflame.runtime.calls.batching.reservations import EARLY, LATE_S, Reservations


class Beside(RuleBasedStateMachine):
    """Compares `Reservations` with a list. A caller uses its reservations in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()
        self.reservations = Reservations()
        self.model: list[tuple[str, float, float]] = []
        self.now_s = 0.0

    @rule(body=st.sampled_from("xyz"), wait_s=st.sampled_from([0.5, 2.0, 10.0]))
    def make(self, body: str, wait_s: float) -> None:
        self.reservations.make("tenant", body.encode(), self.now_s, wait_s, 1.0)
        self.model.append((body, self.now_s + wait_s * (1 - EARLY), self.now_s + wait_s + LATE_S))

    @rule(body=st.sampled_from("xyz"))
    def use(self, body: str) -> None:
        # Only the caller's oldest reservation can be used, so that an earlier promise is kept before a later one.
        due = [entry for entry in self.model if entry[0] == body][:1]
        due = [entry for entry in due if entry[1] <= self.now_s]
        assert self.reservations.use("tenant", body.encode(), self.now_s, 1.0) == bool(due)
        if due:
            self.model.remove(due[0])
        assert not self.reservations.use("another", body.encode(), self.now_s, 1.0)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.model = [entry for entry in self.model if self.now_s <= entry[2]]

    @invariant()
    def agrees(self) -> None:
        assert self.reservations.pending(self.now_s) == len(self.model)


TestBeside = Beside.TestCase


@given(st.floats(0.05, 60.0))
def test_a_retry_when_told_is_served_and_one_at_once_is_not(wait_s: float) -> None:
    made = Reservations()
    made.make("a", b"body", 10.0, wait_s, 1.0)
    assert not made.use("a", b"body", 10.001, 1.0)
    assert not made.use("a", b"other", 10.0 + wait_s, 1.0)
    assert not made.use("b", b"body", 10.0 + wait_s, 1.0)
    assert made.use("a", b"body", 10.0 + wait_s, 1.0)
    assert not made.use("a", b"body", 10.0 + wait_s, 1.0)


def test_beyond_the_limit_the_oldest_are_dropped() -> None:
    made = Reservations()
    for number in range(reservations.MAX_RESERVATIONS + 5):
        made.make("a", str(number).encode(), 0.0, 1.0, 1.0)
    assert made.pending(0.0) == reservations.MAX_RESERVATIONS
    assert not made.use("a", b"4", 1.0, 1.0)
    assert made.use("a", b"5", 1.0, 1.0)

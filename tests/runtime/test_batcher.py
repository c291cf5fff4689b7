"""The batcher: the pure policy, and the queue that carries it out."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pilotlight.runtime.batcher import MAX_PREFETCH, PREFETCH_S, Batcher, Load, decide, window


@given(st.integers(0, 10_000), st.integers(1, 4096))
def test_it_takes_what_is_there_and_never_more_than_the_limit(queued: int, max_size: int) -> None:
    taken = decide(Load(queued, max_size))
    assert 0 <= taken <= min(queued, max_size)
    assert (taken > 0) == (queued > 0)  # work-conserving: it never waits while there is something


@given(st.integers(1, 4096), st.none() | st.floats(0, 100))
def test_a_window_holds_what_can_run_and_a_bounded_advance(slots: int, exec_s: float | None) -> None:
    advance = window(slots, exec_s) - slots
    assert 0 <= advance <= MAX_PREFETCH
    assert advance & (advance - 1) == 0  # a power of two, or none
    if exec_s is None or exec_s >= PREFETCH_S:
        assert advance == 0


@given(st.integers(1, 100), st.floats(0, 1), st.floats(0, 1))
def test_shorter_calls_never_get_less_in_advance(slots: int, one: float, other: float) -> None:
    assert window(slots, min(one, other)) >= window(slots, max(one, other))


class Queue(RuleBasedStateMachine):
    """A batcher beside a list: what goes in comes out once, in order, in groups within the limit."""

    def __init__(self) -> None:
        super().__init__()
        self.batcher: Batcher[int] = Batcher(3)
        self.model: list[int] = []
        self.next = 0

    @rule(count=st.integers(1, 5))
    def put(self, count: int) -> None:
        for _ in range(count):
            self.batcher.put(self.next)
            self.model.append(self.next)
            self.next += 1

    @rule()
    def take_nowait(self) -> None:
        group = self.batcher.take_nowait()
        assert group == self.model[:3]
        del self.model[:3]

    @rule()
    def take(self) -> None:
        if self.model:
            assert self.batcher.take() == self.model[:3]
            del self.model[:3]

    @rule(takers=st.integers(1, 3))
    def close_and_begin_anew(self, takers: int) -> None:
        assert self.batcher.close(takers) == self.model
        assert self.batcher.take_nowait() == []  # leaves the end for `take`
        assert [self.batcher.take() for _ in range(takers)] == [[]] * takers
        self.batcher, self.model = Batcher(3), []

    @invariant()
    def order(self) -> None:
        assert self.model == sorted(self.model)


TestQueue = Queue.TestCase


@pytest.mark.parametrize("takers", [1, 4])
def test_closing_ends_every_taker_that_waits(takers: int) -> None:
    batcher: Batcher[int] = Batcher(8)
    ended: list[list[int]] = []
    threads = [threading.Thread(target=lambda: ended.append(batcher.take())) for _ in range(takers)]
    for thread in threads:
        thread.start()
    assert batcher.close(takers) == []
    for thread in threads:
        thread.join(30)
    assert ended == [[]] * takers


def test_many_takers_share_everything_out_once() -> None:
    batcher: Batcher[int] = Batcher(4)
    taken: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while group := batcher.take():
            assert len(group) <= 4
            with lock:
                taken.extend(group)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for item in range(1000):
        batcher.put(item)
    left = batcher.close(3)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(taken + left) == list(range(1000))

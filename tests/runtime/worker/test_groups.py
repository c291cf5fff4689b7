"""The queue of groups: beside a list, and between threads."""

import threading

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from pilotflame.runtime.worker.groups import Groups


class Queue(RuleBasedStateMachine):
    """A queue beside a list: what goes in comes out once, in order, in the groups in which it came."""

    def __init__(self) -> None:
        super().__init__()
        self.groups: Groups[int] = Groups()
        self.model: list[list[int]] = []
        self.next = 0

    @rule(size=st.integers(1, 5))
    def put(self, size: int) -> None:
        group = list(range(self.next, self.next + size))
        self.groups.put(group)
        self.model.append(group)
        self.next += size

    @rule()
    def take(self) -> None:
        if self.model:
            assert self.groups.take() == self.model.pop(0)

    @rule(takers=st.integers(1, 3))
    def close_and_begin_anew(self, takers: int) -> None:
        assert self.groups.close(takers) == [item for group in self.model for item in group]
        assert [self.groups.take() for _ in range(takers)] == [[]] * takers
        self.groups, self.model = Groups(), []


TestQueue = Queue.TestCase


@pytest.mark.parametrize("takers", [1, 4])
def test_closing_ends_every_taker_that_waits(takers: int) -> None:
    groups: Groups[int] = Groups()
    ended: list[list[int]] = []
    threads = [threading.Thread(target=lambda: ended.append(groups.take())) for _ in range(takers)]
    for thread in threads:
        thread.start()
    assert groups.close(takers) == []
    for thread in threads:
        thread.join(30)
    assert ended == [[]] * takers


def test_many_takers_share_everything_out_once() -> None:
    groups: Groups[int] = Groups()
    taken: list[int] = []
    lock = threading.Lock()

    def work() -> None:
        while group := groups.take():
            with lock:
                taken.extend(group)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for item in range(0, 1000, 2):
        groups.put([item, item + 1])
    left = groups.close(3)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(taken + left) == list(range(1000))

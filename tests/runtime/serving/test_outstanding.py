"""What a worker was given: random groups and answers beside a naive account."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given as draws
from pilotflame.runtime.batching.latency_curve import LatencyCurve
from pilotflame.runtime.serving.outstanding import Outstanding


class Name:
    """Stands for an invocation."""


@draws(st.integers(1, 3), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=20))
def test_groups_run_in_order_so_many_at_a_time(slots: int, steps: list[tuple[int, int]]) -> None:
    """Each step sends a group of a size, then answers some of the oldest group's members."""
    given, now_s = Outstanding(), 0.0
    given.batching, given.slots = True, slots
    sent: list[list[int]] = []
    for size, answered in steps:
        now_s += 1.0
        sent.append(given.add([Name() for _ in range(size)], now_s))  # type: ignore[misc]
        for _ in range(answered):
            if not sent:
                break
            channel = sent[0].pop(0)
            invocation, ended = given.take(channel, now_s, 2.0)
            assert isinstance(invocation, Name)
            assert (ended is not None) == (not sent[0])
            if ended is not None:
                sent.pop(0)
                assert ended.cost == 2.0 * ended.size
                assert ended.seconds >= 0
        assert given.running() == {channel for group in sent[:slots] for channel in group}
        assert given.groups == len(sent)
        assert len(given) == sum(map(len, sent))
    assert given.take(10**6, now_s) == (None, None)


def test_a_group_that_stood_behind_another_counts_from_when_that_ended() -> None:
    given = Outstanding()
    given.batching = True
    (first,), (second,) = given.add([Name()], 10.0), given.add([Name()], 11.0)  # type: ignore[misc]
    assert given.take(first, 14.0)[1].seconds == 4.0  # type: ignore[union-attr]
    assert given.take(second, 16.0)[1].seconds == 2.0  # type: ignore[union-attr]


def test_what_was_given_back_teaches_nothing() -> None:
    given = Outstanding()
    given.batching = True
    (channel,) = given.add([Name()], 1.0)  # type: ignore[misc]
    ended = given.take(channel, 5.0, 0.0)[1]
    assert ended is not None
    assert ended.seconds == 0


def test_those_that_failed_count_as_much_as_the_others_of_their_group() -> None:
    given = Outstanding()
    given.batching = True
    good, bad = given.add([Name(), Name()], 1.0)  # type: ignore[misc]
    given.take(bad, 5.0, 0.0)
    assert given.take(good, 5.0, 500.0)[1] == (2, 1000.0, 4.0)


def test_singles_run_by_slots_and_its_time_at_work_is_counted() -> None:
    given = Outstanding()
    given.slots = 2
    channels = [given.add([Name()], 1.0)[0] for _ in range(3)]  # type: ignore[misc]
    assert given.running() == set(channels[:2])
    for channel in channels:
        given.take(channel, 4.0)
    assert given.working_s(9.0) == 3.0


def test_since_when_each_runs() -> None:
    given = Outstanding()
    given.batching = True
    (first,), (second,) = given.add([Name()], 10.0), given.add([Name()], 11.0)  # type: ignore[misc]
    assert (given.began_s(first), given.began_s(second)) == (10.0, None)
    given.take(first, 14.0)
    assert (given.began_s(first), given.began_s(second)) == (None, 14.0)


def test_when_a_lane_will_be_free() -> None:
    given, curve = Outstanding(), LatencyCurve()
    given.batching = True
    for size in (1, 2, 4):
        curve.observe(size, size, 0.01 * size)
    assert given.free_at(5.0, curve) == 5.0
    given.add([Name(), Name()], 5.0)  # type: ignore[list-item]
    assert given.free_at(5.005, curve) == pytest.approx(5.02)
    assert given.free_at(6.0, curve) == 6.0  # it should have ended: now, as far as anybody knows
    given.add([Name()] * 4, 5.0)  # type: ignore[list-item]
    assert given.free_at(5.005, curve) == pytest.approx(5.06)

"""Compares `Outstanding` with a simple model, for random batches and results."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given
from pilotflame.runtime.calls.batching.latency_curve import LatencyCurve
from pilotflame.runtime.calls.batching.outstanding import Outstanding


class Call:
    sent_s = 1.0


@given(st.integers(1, 3), st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=20))
def test_batches_run_in_order_in_so_many_slots(slots: int, steps: list[tuple[int, int]]) -> None:
    """Each step sends a batch of a size, then ends some items of the oldest batch."""
    outstanding, now_s = Outstanding[Call](slots, batching=True), 0.0
    sent: list[list[int]] = []
    for size, answered in steps:
        now_s += 1.0
        sent.append(outstanding.add_batch([Call() for _ in range(size)], now_s))
        for _ in range(answered):
            if not sent:
                break
            channel = sent[0].pop(0)
            invocation, ended = outstanding.remove(channel, now_s, 2.0)
            assert isinstance(invocation, Call)
            assert (ended is not None) == (not sent[0])
            if ended is not None:
                sent.pop(0)
                assert ended.cost == 2.0 * ended.size
                assert ended.seconds >= 0
        assert outstanding.running() == {channel for batch in sent[:slots] for channel in batch}
        assert outstanding.load == len(sent)
        assert len(outstanding.calls) == sum(map(len, sent))
    assert outstanding.remove(10**6, now_s) == (None, None)


def test_a_batch_behind_another_starts_when_that_ends() -> None:
    outstanding = Outstanding[Call](batching=True)
    (first,), (second,) = outstanding.add_batch([Call()], 10.0), outstanding.add_batch([Call()], 11.0)
    assert outstanding.remove(first, 14.0)[1].seconds == 4.0  # type: ignore[union-attr]
    assert outstanding.remove(second, 16.0)[1].seconds == 2.0  # type: ignore[union-attr]


def test_a_batch_that_was_returned_has_no_duration() -> None:
    outstanding = Outstanding[Call](batching=True)
    (channel,) = outstanding.add_batch([Call()], 1.0)
    ended = outstanding.remove(channel, 5.0, 0.0)[1]
    assert ended is not None
    assert ended.seconds == 0


def test_failed_items_count_as_much_as_the_others_of_their_batch() -> None:
    outstanding = Outstanding[Call](batching=True)
    good, bad = outstanding.add_batch([Call(), Call()], 1.0)
    outstanding.remove(bad, 5.0, 0.0)
    assert outstanding.remove(good, 5.0, 500.0)[1] == (2, 1000.0, 4.0)


def test_single_items_run_in_slots_and_busy_time_is_counted() -> None:
    outstanding = Outstanding[Call](2)
    channels = [outstanding.add(Call(), 1.0) for _ in range(3)]
    assert outstanding.running() == set(channels[:2])
    for channel in channels:
        outstanding.remove(channel, 4.0)
    assert outstanding.total_busy_s(9.0) == 3.0


def test_when_each_started() -> None:
    outstanding, first, second = Outstanding[Call](batching=True), Call(), Call()
    (channel,), _ = outstanding.add_batch([first], 10.0), outstanding.add_batch([second], 11.0)
    assert (outstanding.started_s(first), outstanding.started_s(second)) == (10.0, None)
    outstanding.remove(channel, 14.0)
    assert (outstanding.started_s(first), outstanding.started_s(second)) == (None, 14.0)


@dataclass
class SentAt:
    sent_s: float


@given(st.integers(1, 3), st.lists(st.integers(0, 9), max_size=40))
def test_a_single_item_starts_when_it_has_a_slot(slots: int, steps: list[int]) -> None:
    """Each step adds an item (9), adds a slot (8), or removes the item at an index. `started` is the model: the start of each item."""
    outstanding, now_s = Outstanding[SentAt](slots), 0.0
    started: dict[int, float | None] = {}
    for step in steps:
        now_s += 1.0
        if step == 9:
            started[outstanding.add(SentAt(now_s), now_s)] = None
        elif step == 8:
            slots += 1
            outstanding.resize(slots, now_s)
        elif step < len(started):
            channel = list(started)[step]
            outstanding.remove(channel, now_s)
            del started[channel]
        waiting = [channel for channel, start_s in started.items() if start_s is None]
        for channel in waiting[: slots - (len(started) - len(waiting))]:
            started[channel] = now_s
        assert {channel: outstanding.started_s(outstanding.calls[channel]) for channel in started} == started
        if len(started) - len(waiting) == slots:
            assert outstanding.newest_start_s >= max(at_s for at_s in started.values() if at_s is not None)
        assert outstanding.running() == {
            channel for channel, start_s in started.items() if start_s is not None
        }


def test_a_batch_starts_in_a_slot_that_is_new_and_starts_anew_with_each_call() -> None:
    outstanding = Outstanding[Call](batching=True)
    outstanding.add_batch([Call()], 1.0)
    second, third = Call(), Call()
    channel, _ = outstanding.add_batch([second, third], 2.0)
    outstanding.resize(2, 3.0)
    assert outstanding.started_s(second) == 3.0
    assert outstanding.split(channel, 4.0) == [second, third]
    assert outstanding.started_s(second) == 4.0


def test_when_a_slot_will_be_free() -> None:
    outstanding, curve = Outstanding[Call](batching=True), LatencyCurve()
    for size in (1, 2, 4):
        curve.observe(size, size, 0.01 * size)
    assert outstanding.expected_at(5.0, curve) == 5.0
    outstanding.add_batch([Call(), Call()], 5.0)
    assert outstanding.expected_at(5.005, curve) == pytest.approx(5.02)
    # The batch is overdue, and its expected end stays the same.
    assert outstanding.expected_at(6.0, curve) == pytest.approx(5.02)
    outstanding.add_batch([Call()] * 4, 5.0)
    assert outstanding.expected_at(5.005, curve) == pytest.approx(5.06)


@given(st.lists(st.tuples(st.floats(0, 10), st.booleans()), max_size=40))
def test_the_seconds_of_all_items_are_summed(steps: list[tuple[float, bool]]) -> None:
    """In each step, time passes, and then an item is added or the oldest item is removed."""
    outstanding, now_s, true_s = Outstanding[Call](slots=3), 1e6, 0.0
    for gap_s, comes in steps:
        true_s += gap_s * len(outstanding.calls)
        now_s += gap_s
        if comes:
            outstanding.add(Call(), now_s)
        elif outstanding.calls:
            outstanding.remove(next(iter(outstanding.calls)), now_s)
        assert outstanding.load_s(now_s) == pytest.approx(true_s, abs=1e-3)
    outstanding.clear(now_s)
    assert outstanding.load_s(now_s + 5) == pytest.approx(true_s, abs=1e-3)


def test_slots_are_overdue_whose_call_or_batch_began_too_early() -> None:
    calls = Outstanding[Call](slots=2)
    for _ in range(3):
        calls.add(Call(), 1.0)
    assert calls.overdue(1.5) == 1.0
    assert calls.overdue(0.5) == 0.0
    batches = Outstanding[Call](slots=2, batching=True)
    batches.add_batch([Call(), Call()], 10.0)
    batches.add_batch([Call()], 20.0)
    assert batches.overdue(15.0) == 0.5

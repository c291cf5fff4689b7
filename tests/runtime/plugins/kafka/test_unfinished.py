"""Waiting messages with the same key are delivered in order, one at a time. The committed offset passes no unfinished message."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.plugins.kafka.unfinished import Record, RecordPlace, TakenOffsets, WaitingRecords


def record(partition: int, offset: int, key: str | None) -> Record:
    return Record(RecordPlace(partition, offset), None if key is None else key.encode(), b"12", (), 0)


records = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 30), st.sampled_from([None, "a", "b"]), st.integers(0, 9)),
    unique_by=lambda one: one[:2],
    max_size=20,
)


@given(records, st.integers(1, 4), st.data())
def test_each_is_delivered_once_in_the_order_of_its_key_and_not_before_it_is_due(
    given_records: list[tuple[int, int, str | None, int]], limit: int, data: st.DataObject
) -> None:
    waiting = WaitingRecords()
    due = {}
    for partition, offset, key, due_s in given_records:
        one = record(partition, offset, key)
        waiting.add(one, float(due_s))
        due[one.place] = due_s
    delivered: list[Record] = []
    busy: set[str] = set()
    now_s = 0.0
    while len(waiting):
        assert waiting.size_bytes == 2 * len(waiting)
        found = waiting.take(limit, now_s, busy)
        groups = [one.group for one in found if one.group]
        assert len(found) <= limit
        assert len({*groups}) == len(groups)
        assert not busy & {*groups}
        assert all(due[one.place] <= now_s for one in found)
        delivered += found
        busy |= {*groups}
        ended = data.draw(st.sets(st.sampled_from(sorted(busy)))) if busy else set()
        busy -= ended
        if not found and not ended:
            # Free all groups, and move the time to `due_s`, so that the next turn can deliver a message.
            now_s, busy = max(now_s, min(waiting.due_s(()), 10.0)), set()
    assert (waiting.due_s(()), waiting.size_bytes) == (math.inf, 0)
    assert {one.place for one in delivered} == due.keys()
    for group in {one.group for one in delivered} - {""}:
        places = [one.place for one in delivered if one.group == group]
        assert places == sorted(places)


@given(records)
def test_another_member_gets_the_messages_of_its_partitions(
    given_records: list[tuple[int, int, str | None, int]],
) -> None:
    waiting = WaitingRecords()
    for partition, offset, key, _ in given_records:
        waiting.add(record(partition, offset, key), 0.0)
    waiting.drop(0)
    left: list[Record] = []
    while len(waiting):
        left += waiting.take(100, 1.0, ())
    assert sorted(one.place for one in left) == sorted(
        RecordPlace(*one[:2]) for one in given_records if one[0] == 1
    )
    assert waiting.size_bytes == 0


@given(st.data(), st.lists(st.integers(1, 3), max_size=20))
def test_a_consumer_resumes_at_the_first_message_that_is_not_finished(
    data: st.DataObject, gaps: list[int]
) -> None:
    taken = TakenOffsets()
    assert (taken.resume_at, taken.span) == (None, 0)
    there: list[int] = []
    finished: set[int] = set()
    offset = data.draw(st.integers(0, 1000))
    for gap in gaps:
        offset += gap
        taken.take(offset)
        there.append(offset)
        for one in data.draw(st.lists(st.sampled_from(there), max_size=3)):
            if one not in finished:
                taken.finish(one)
                finished.add(one)
        left = [one for one in there if one not in finished]
        assert taken.resume_at == (left[0] if left else there[-1] + 1)
        # Another consumer would begin at the first unfinished message, and receive all later messages again.
        assert taken.span == sum(one >= left[0] for one in there) if left else taken.span == 0

"""The committed offset never passes a message that is not finished."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.plugins.kafka.offsets import TakenOffsets


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
        # Finished messages behind an unfinished one would be received again.
        assert taken.span == sum(one >= left[0] for one in there) if left else taken.span == 0

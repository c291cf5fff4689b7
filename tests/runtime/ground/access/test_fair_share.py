"""A shared room: one owner cannot fill it, and owners that fill it together get equal shares."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import Overloaded
from pilotflame.runtime.ground.access.fair_share import SharedRoom, share_used

OWNERS = st.sampled_from(["", "a", "b", "c"])


@given(st.integers(1, 12), st.integers(0, 2_000))
def test_owners_that_fill_a_room_get_equal_shares_and_leave_a_place_free(owners: int, room: int) -> None:
    used = [0] * owners
    while any(open_ := [not share_used(own, room - sum(used)) for own in used]):
        used[used.index(min(own for own, may in zip(used, open_, strict=True) if may))] += 1
    assert max(used) - min(used) <= 1
    assert abs(used[0] - 9 * room / (1 + 9 * owners)) <= 9
    if room >= 9 * owners + 1:
        assert sum(used) < room


def test_an_owner_alone_gets_nine_tenths() -> None:
    assert not share_used(899, 101)
    assert share_used(900, 100)


@given(st.lists(st.tuples(OWNERS, st.integers(0, 300), st.booleans())))
def test_the_sum_is_limited_and_a_new_owner_has_room(steps: list[tuple[str, int, bool]]) -> None:
    room, held = SharedRoom(1000), list[tuple[str, int]]()
    for owner, size, ends in steps:
        if ends and held:
            room.remove(*held.pop())
            continue
        if not room.takes(owner, size):
            continue
        room.add(owner, size)
        held.append((owner, size))
        used = Counter[str]()
        for name, count in held:
            used[name] += count
        assert room.total == sum(used.values()) <= 1000
        assert max(used.values()) < 900
        # A new owner may use almost nine tenths of the free bytes.
        assert room.takes("new", (9 * (1000 - sum(used.values())) - 1) // 10)
    while held:
        room.remove(*held.pop())
    assert room.takes("a", 899)


def test_what_is_held_counts_until_the_block_ends() -> None:
    room = SharedRoom(1000)
    with room.held("a", 800, "uploads"):
        assert room.total == 800
        with (
            pytest.raises(Overloaded, match="holds as many bytes of uploads as it may") as refused,
            room.held("a", 150, "uploads"),
        ):
            pass
        assert refused.value.details == {"retry_after_s": 1.0}
        with room.held("b", 150, "uploads"):
            assert room.total == 950
    assert room.total == 0
    with pytest.raises(KeyError), room.held("a", 800, "uploads"):
        raise KeyError
    assert room.total == 0

"""The node's limit: its promises for every set of claims."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pilotflame.runtime.scaling.node_limit import Claim, giving, granted, poorest_first


@st.composite
def claims(draw: st.DrawFn) -> Claim:
    workers = draw(st.integers(0, 6))
    draining = draw(st.integers(0, workers))
    resting = draw(st.integers(0, workers - draining))
    idle = draw(st.integers(0, resting))
    return Claim(workers, draining, idle, resting, draw(st.integers(0, 5)), draw(st.booleans()))


SETS = st.lists(claims(), min_size=1, max_size=6)


@given(SETS, st.integers(1, 20))
def test_all_grants_together_fill_the_node_and_no_more(found: list[Claim], most: int) -> None:
    free = max(0, most - sum(claim.workers for claim in found))
    grants = [granted(found, number, most) for number in range(len(found))]
    assert sum(grants) == min(free, sum(claim.missing for claim in found))
    assert all(grant <= claim.missing for grant, claim in zip(grants, found, strict=True))


@given(SETS, st.integers(1, 20))
def test_one_at_zero_has_its_first_before_another_has_its_next(found: list[Claim], most: int) -> None:
    grants = [granted(found, number, most) for number in range(len(found))]
    hungry = [
        n for n, one in enumerate(found) if one.waiting and one.missing and not one.kept and not grants[n]
    ]
    if hungry:
        # Only others that also had none got one.
        assert all(one.kept + grant <= 1 for one, grant in zip(found, grants, strict=True) if grant)


@given(SETS, st.integers(1, 20))
def test_if_the_first_in_turn_gets_none_nobody_gets_one(found: list[Claim], most: int) -> None:
    gets = [granted(found, one, most) > 0 or giving(found, one) is not None for one in poorest_first(found)]
    assert len(gets) == sum(claim.missing > 0 for claim in found)
    assert not any(gets) or gets[0]


@given(SETS, st.integers(0, 5))
def test_only_who_can_spare_one_gives(found: list[Claim], asking: int) -> None:
    assume(asking < len(found))
    giver = giving(found, asking)
    if giver is None:
        return
    mine, other = found[asking], found[giver]
    assert giver != asking
    assert mine.waiting
    assert mine.missing
    assert other.kept >= 1
    # A busy one is taken only if the other has at least as many as the one who asks after that.
    if not other.idle:
        assert other.kept - 1 >= mine.kept + 1 or (other.resting and not mine.kept)


@given(SETS, st.integers(0, 5))
def test_no_more_give_than_callers_wait_for(found: list[Claim], asking: int) -> None:
    """Each gives in turn until none has to."""
    assume(asking < len(found))
    given_up = 0
    while (giver := giving(found, asking)) is not None:
        one = found[giver]
        resting = max(0, one.resting - 1)
        found[giver] = one._replace(draining=one.draining + 1, idle=max(0, one.idle - 1), resting=resting)
        given_up += 1
    assert given_up <= sum(claim.missing for claim in found if claim.waiting)


def test_two_who_have_one_each_do_not_take_turns_at_it() -> None:
    found = [Claim(1, missing=3, waiting=True), Claim(1, resting=1)]
    assert giving(found, 0) is None
    assert giving([found[0], Claim(1, idle=1, resting=1)], 0) == 1
    assert giving([Claim(0, missing=1, waiting=True), found[1]], 0) == 1


@pytest.mark.parametrize(
    ("rich", "poor", "gives"), [(4, 0, 0), (2, 0, 0), (1, 0, None), (4, 2, 0), (3, 2, None)]
)
def test_the_richest_gives_until_both_have_as_many(rich: int, poor: int, gives: int | None) -> None:
    assert giving([Claim(rich), Claim(poor, missing=1, waiting=True)], 1) == gives

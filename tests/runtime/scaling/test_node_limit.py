"""The node's limit: its promises for every set of claims."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pilotflame.runtime.scaling.node_limit import (
    Claim,
    Limits,
    ReachedLimit,
    cap,
    giving,
    granted,
    poorest_first,
)


@st.composite
def claims(draw: st.DrawFn) -> Claim:
    workers = draw(st.integers(0, 6))
    draining = draw(st.integers(0, workers))
    resting = draw(st.integers(0, workers - draining))
    idle = draw(st.integers(0, resting))
    kept = workers - draining
    return Claim(
        workers, draining, idle, resting, draw(st.integers(0, 5)), draw(st.booleans()),
        draw(st.sampled_from(("", "a", "b"))), draw(st.integers(0, kept - resting)),
    )  # fmt: skip


SETS = st.lists(claims(), min_size=1, max_size=6)
NODE = Limits(4)
OWNERS = st.dictionaries(st.sampled_from(("a", "b")), st.integers(1, 12))
LIMITS = st.builds(Limits, st.none() | st.integers(1, 20), OWNERS)


def owned(found: list[Claim], owner: str) -> int:
    return sum(claim.workers for claim in found if claim.owner == owner)


@given(SETS, st.integers(1, 20))
def test_all_grants_together_fill_the_node_and_no_more(found: list[Claim], most: int) -> None:
    free = max(0, most - sum(claim.workers for claim in found))
    grants = [granted(found, number, Limits(most)) for number in range(len(found))]
    assert sum(grants) == min(free, sum(claim.missing for claim in found))
    assert all(grant <= claim.missing for grant, claim in zip(grants, found, strict=True))


@given(SETS, st.integers(1, 20))
def test_one_at_zero_has_its_first_before_another_has_its_next(found: list[Claim], most: int) -> None:
    grants = [granted(found, number, Limits(most)) for number in range(len(found))]
    hungry = [
        n for n, one in enumerate(found) if one.waiting and one.missing and not one.kept and not grants[n]
    ]
    if hungry:
        # Only others that also had none got one.
        assert all(one.kept + grant <= 1 for one, grant in zip(found, grants, strict=True) if grant)


@given(SETS, st.integers(1, 20))
def test_if_the_first_in_turn_gets_none_nobody_gets_one(found: list[Claim], most: int) -> None:
    # Callers do not wait where a worker has nothing to do.
    assume(not any(one.waiting and one.missing and one.resting for one in found))
    gets = [
        granted(found, one, Limits(most)) > 0 or giving(found, one, Limits(most)) is not None
        for one in poorest_first(found)
    ]
    assert len(gets) == sum(claim.missing > 0 for claim in found)
    assert not any(gets) or gets[0]


@given(SETS, LIMITS)
def test_grants_stay_within_the_limits_of_owners_and_node_and_use_them_up(
    found: list[Claim], limits: Limits
) -> None:
    grants = [granted(found, number, limits) for number in range(len(found))]
    after = [one._replace(workers=one.workers + grant) for one, grant in zip(found, grants, strict=True)]
    for owner, most in limits.owners.items():
        assert owned(after, owner) <= max(most, owned(found, owner))
    total = sum(one.workers for one in after)
    assert limits.node is None or total <= max(limits.node, sum(one.workers for one in found))
    for number, (one, grant) in enumerate(zip(found, grants, strict=True)):
        assert 0 <= grant <= one.missing
        # Who has fewer than they want has met a limit, which says its name.
        reached = cap(after, number, limits)
        if grant < one.missing:
            assert reached is not None
        if reached == ReachedLimit("owner_limit", limits.owners.get(one.owner, 0)):
            assert owned(after, one.owner) >= limits.owners[one.owner]


@given(SETS, LIMITS)
def test_who_is_below_their_limit_is_not_held_up_by_an_owner_who_is_not(
    found: list[Claim], limits: Limits
) -> None:
    first = next(iter(poorest_first(found)), None)
    if first is None or granted(found, first, limits):
        return
    reached = cap(found, first, limits)
    assert reached is not None
    for number in poorest_first(found):
        if reached.name == "max_workers" or found[number].owner == found[first].owner:
            assert not granted(found, number, limits)


@given(SETS, st.integers(0, 5), LIMITS)
def test_only_who_can_spare_one_gives(found: list[Claim], asking: int, limits: Limits) -> None:
    assume(asking < len(found))
    giver = giving(found, asking, limits)
    if giver is None:
        return
    mine, other = found[asking], found[giver]
    assert giver != asking
    assert mine.waiting
    assert mine.missing
    assert other.kept > other.least
    reached = cap(found, asking, limits)
    if reached is not None and reached.name == "owner_limit":
        assert other.owner == mine.owner
    # A busy one is taken only if the other has at least as many as the one who asks after that.
    if not other.idle:
        assert other.kept - 1 >= mine.kept + 1 or (other.resting and not mine.kept)


@given(SETS, st.integers(0, 5), LIMITS)
def test_no_more_give_than_callers_wait_for(found: list[Claim], asking: int, limits: Limits) -> None:
    """Each gives in turn until none has to."""
    assume(asking < len(found))
    given_up = 0
    while (giver := giving(found, asking, limits)) is not None:
        one = found[giver]
        resting = max(0, one.resting - 1)
        found[giver] = one._replace(draining=one.draining + 1, idle=max(0, one.idle - 1), resting=resting)
        given_up += 1
    assert given_up <= sum(claim.missing for claim in found if claim.waiting)


def test_two_who_have_one_each_do_not_take_turns_at_it() -> None:
    found = [Claim(1, missing=3, waiting=True), Claim(1, resting=1)]
    assert giving(found, 0, Limits(2)) is None
    assert giving([found[0], Claim(1, idle=1, resting=1)], 0, Limits(2)) == 1
    assert giving([Claim(0, missing=1, waiting=True), found[1]], 0, Limits(1)) == 1


@pytest.mark.parametrize(
    ("rich", "poor", "gives"), [(4, 0, 0), (2, 0, 0), (1, 0, None), (4, 2, 0), (3, 2, None)]
)
def test_the_richest_gives_until_both_have_as_many(rich: int, poor: int, gives: int | None) -> None:
    assert giving([Claim(rich), Claim(poor, missing=1, waiting=True)], 1, Limits(rich + poor)) == gives


def test_nobody_gives_what_its_settings_keep() -> None:
    poor = Claim(0, missing=1, waiting=True)
    assert giving([Claim(4, least=4), poor], 1, NODE) is None
    assert giving([Claim(5, least=4), poor], 1, NODE) == 0
    # The second richest has one to spare.
    assert giving([Claim(4, least=4), poor, Claim(3, least=1)], 1, NODE) == 2


def test_nobody_gives_while_there_is_room_for_all_who_wait() -> None:
    idle = Claim(1, idle=1, resting=1, owner="b")
    # The owner's last place is for the poorer one. The other can have none, whatever another owner gives.
    found = [
        Claim(2, missing=2, waiting=True, owner="a"),
        Claim(0, missing=1, waiting=True, owner="a"),
        idle,
    ]
    assert granted(found, 0, Limits(20, {"a": 3})) == 0
    assert giving(found, 0, Limits(20, {"a": 3})) is None
    # Of three workers, the third has a place or needs one.
    found = [Claim(0, missing=2, waiting=True, owner="a"), Claim(0, missing=1, waiting=True, owner="a"), idle]
    assert giving(found, 0, Limits(4)) is None
    assert giving(found, 0, Limits(3)) == 2
    # Without a limit of the node, it is the owner's places that count.
    found = [found[0], found[1], idle._replace(owner="a")]
    assert giving(found, 0, Limits(None, {"a": 4})) is None
    assert giving(found, 0, Limits(None, {"a": 3})) == 2


def test_an_owner_at_their_limit_takes_from_their_own_functions_alone() -> None:
    limits = Limits(20, {"a": 3})
    found = [
        Claim(0, missing=2, waiting=True, owner="a"),
        Claim(3, owner="a"),
        Claim(9, idle=9, resting=9, owner="b"),
    ]
    assert cap(found, 0, limits) == ReachedLimit("owner_limit", 3)
    assert giving(found, 0, limits) == 1
    # Another owner's functions give no more than this one may still have.
    found = [Claim(2, missing=5, waiting=True, owner="a"), Claim(18, owner="b")]
    assert giving(found, 0, limits) == 1
    assert giving([found[0], Claim(18, draining=1, owner="b")], 0, limits) is None

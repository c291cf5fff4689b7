"""The table: the properties of `combine` for any proposals and caps."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.seen import Seen
from pilotflame.runtime.node.scaling.table import EVERY, Cap, Proposal, Rank, combine

CAUSES = st.sampled_from(["a", "b", "c"])
BOUNDS = st.just(math.inf) | st.integers(0, 12)
PROPOSALS = st.lists(
    st.builds(
        Proposal, st.sampled_from(Rank), CAUSES, st.integers(0, 10), st.integers(0, 10), st.floats(0, 100)
    ),
    max_size=6,
)
CAPS = st.builds(Cap, CAUSES, st.frozensets(st.sampled_from(Rank)), BOUNDS, BOUNDS, BOUNDS, st.floats(0, 100))
SEEN = st.builds(
    Seen, st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5),
    parked_since_s=st.lists(st.floats(0, 100), max_size=3).map(tuple),
)  # fmt: skip


@given(PROPOSALS, st.lists(CAPS, max_size=4), SEEN, st.randoms())
def test_the_order_of_mechanisms_and_their_repetition_are_irrelevant(
    proposals: list[Proposal], caps: list[Cap], seen: Seen, random: object
) -> None:
    row = combine(proposals, caps, seen)
    shuffled, shuffled_caps = proposals * 2, caps * 2
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    random.shuffle(shuffled_caps)  # type: ignore[attr-defined]
    again = combine(shuffled, shuffled_caps, seen)
    assert again._replace(wanted=()) == row._replace(wanted=())
    start = row.start(seen)
    assert list(again.causes(seen, start)) == list(row.causes(seen, start))


@given(PROPOSALS, st.lists(CAPS, max_size=4), CAPS, SEEN)
def test_a_cap_never_raises_a_number(
    proposals: list[Proposal], caps: list[Cap], cap: Cap, seen: Seen
) -> None:
    free, bounded = combine(proposals, caps, seen), combine(proposals, [*caps, cap], seen)
    assert bounded.awake <= free.awake
    assert bounded.held <= free.held
    assert bounded.start(seen) <= free.start(seen)


@given(PROPOSALS, st.lists(CAPS, max_size=4), SEEN)
def test_each_bound_holds_if_it_is_on_every_rank(
    proposals: list[Proposal], caps: list[Cap], seen: Seen
) -> None:
    row = combine(proposals, [cap._replace(on=EVERY) for cap in caps], seen)
    assert row.held <= min((cap.held for cap in caps), default=math.inf)
    assert row.start(seen) <= min((cap.starts for cap in caps), default=math.inf)


@given(PROPOSALS, SEEN)
def test_workers_start_up_to_what_is_wanted_and_stay_up_to_what_is_kept(
    proposals: list[Proposal], seen: Seen
) -> None:
    row = combine(proposals, [], seen)
    want = max((one.want for one in proposals), default=0)
    keep = max((max(one.want, one.keep) for one in proposals), default=0)
    assert row.awake == min(max(seen.awake, want), max(keep, want))
    assert row.awake <= row.held <= max(keep, want)


@given(PROPOSALS, st.lists(CAPS, max_size=4), SEEN)
def test_each_start_has_a_cause(proposals: list[Proposal], caps: list[Cap], seen: Seen) -> None:
    row = combine(proposals, caps, seen)
    assert sum(count for _, count in row.causes(seen, row.start(seen))) == row.start(seen)


def test_the_highest_rank_is_the_cause_of_a_worker_that_several_proposals_want() -> None:
    ahead, load = Proposal(Rank.AHEAD, "warmup", 3), Proposal(Rank.LOAD, "load", 2)
    row = combine([ahead, load], [], seen := Seen(2, 0, starting=0, ready=0))
    assert [(one.cause, count) for one, count in row.causes(seen, 3)] == [("load", 2), ("warmup", 1)]
    # If only one worker may start, it starts for the calls.
    assert [(one.cause, count) for one, count in row.causes(seen, 1)] == [("load", 1)]


def test_a_cap_that_refuses_a_start_is_looked_at_when_it_ends() -> None:
    proposal, seen = Proposal(Rank.LOAD, "load", 3), Seen(3, 0, starting=0, ready=0)
    assert combine([proposal], [Cap("backoff", EVERY, starts=1, until_s=9.0)], seen).again_s == 9.0
    assert combine([proposal], [Cap("backoff", EVERY, starts=3, until_s=9.0)], seen).again_s == math.inf


def test_what_stays_beyond_the_wanted_is_looked_at_when_it_ends() -> None:
    keep, seen = Proposal(Rank.KEEP, "window", keep=2, until_s=9.0), Seen(0, 0, starting=0, ready=2)
    assert combine([keep], [], seen).again_s == 9.0
    assert combine([keep, Proposal(Rank.OWNER, "min", 2)], [], seen).again_s == math.inf
    gone = combine([keep], [], replace(seen, ready=0))
    assert (gone.awake, gone.held, gone.again_s) == (0, 0, math.inf)


def test_a_row_says_why() -> None:
    proposals = [Proposal(Rank.LOAD, "load", 3), Proposal(Rank.KEEP, "window", keep=9)]
    row = combine(proposals, [Cap("max", EVERY, held=2)], Seen(3, 0, starting=0, ready=1))
    assert list(row.reasons(0.0)) == ["load wants 2", "window lets 2 stay", "max refuses 1"]


def test_a_row_says_for_how_long() -> None:
    proposals = [
        Proposal(Rank.OWNER, "min", 2),
        Proposal(Rank.AHEAD, "warmup", 1, until_s=43.0),
        Proposal(Rank.KEEP, "window", keep=3, until_s=60.0),
    ]
    backoff = Cap("backoff", EVERY - {Rank.LOAD}, starts=0, until_s=5.0)
    parks = Cap("park_after", frozenset({Rank.KEEP}), awake=1)
    row = combine(proposals, [backoff, parks], Seen(0, 0, starting=0, ready=1, parked_since_s=(0.0, 0.0)))
    assert (row.awake, row.held) == (1, 3)
    assert list(row.reasons(2.0)) == [
        "min wants 1", "warmup wants 1 for 41 s", "window lets 3 stay for 58 s", "backoff refuses 1 for 3.0 s",
        "park_after lets them park",
    ]  # fmt: skip

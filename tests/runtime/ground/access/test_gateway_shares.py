"""The shares of gateways: their sum, what a gateway keeps, and how gateways take turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.access.gateway_shares import PATIENCE_S, GatewayUse, divide, share_of

SMALL = st.integers(0, 12)
USES = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.builds(
        lambda have, busy, want, since_s: GatewayUse(have, min(have, busy), want, since_s),
        SMALL, SMALL, SMALL, st.sampled_from([0.0, PATIENCE_S - 1, PATIENCE_S, 3 * PATIENCE_S]),
    ),
    min_size=1,
)  # fmt: skip


@given(USES, st.integers(1, 20))
def test_the_sum_of_the_shares_is_the_limit(uses: dict[str, GatewayUse], limit: int) -> None:
    shares = divide("f", limit, uses)
    assert min(shares.values()) >= 0
    assert sum(shares.values()) == limit
    now = {one: share_of(one, "f", limit, uses) for one in uses}
    assert all(0 <= now[one] <= shares[one] for one in uses)


@given(USES, st.integers(1, 20))
def test_what_calls_need_comes_before_idle_workers_and_is_divided_evenly(
    uses: dict[str, GatewayUse], limit: int
) -> None:
    shares = divide("f", limit, uses)
    got = {one: min(shares[one], uses[one].want) for one in uses}
    assert sum(got.values()) == min(limit, sum(use.want for use in uses.values()))
    unsatisfied = [got[one] for one in uses if got[one] < uses[one].want]
    # No gateway gets two workers more than a gateway that gets fewer than it wants.
    assert max(got.values()) <= min(unsatisfied, default=max(got.values())) + 1


@given(USES, st.integers(1, 20))
def test_nobody_ends_what_its_share_covers(uses: dict[str, GatewayUse], limit: int) -> None:
    """This is true however far the others exceed their shares. Otherwise two gateways could both end all their workers."""
    shares = divide("f", limit, uses)
    for one, use in uses.items():
        assert share_of(one, "f", limit, uses) >= min(use.have, shares[one])


def test_a_gateway_that_is_alone_or_wants_alone_gets_all() -> None:
    assert share_of("a", "f", 4, {"a": GatewayUse()}) == 4
    # The others have idle workers, which they end.
    uses = {"a": GatewayUse(0, 0, 4), "b": GatewayUse(2), "c": GatewayUse(2)}
    assert [share_of(one, "f", 4, uses) for one in uses] == [4, 0, 0]


@pytest.mark.parametrize("name", ["f", "g", "h", "i"])
def test_the_ages_of_idle_workers_do_not_count(name: str) -> None:
    """The ages come from reports of different times. If they counted, each of two gateways could find the other's worker younger,
    and end its own.
    """
    ages = (0.0, 1.0, 9.0)
    kept = {
        str(divide(name, 1, {"a": GatewayUse(1, 0, 0, one), "b": GatewayUse(1, 0, 0, other)}))
        for one in ages
        for other in ages
    }
    assert len(kept) == 1


def test_a_worker_that_has_a_call_is_waited_for() -> None:
    uses = {"a": GatewayUse(0, 0, 1), "b": GatewayUse(2, 2, 2)}
    assert divide("f", 2, uses) == {"a": 1, "b": 1}
    assert share_of("a", "f", 2, uses) == 0
    uses["b"] = GatewayUse(1, 1, 2)
    assert share_of("a", "f", 2, uses) == 1


@pytest.mark.parametrize("gateways", [2, 3, 5])
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_gateways_take_turns_if_there_is_less_than_one_for_each(limit: int, gateways: int) -> None:
    """All gateways want one worker. They decide once a second, and all have the same reports."""
    limit = min(limit, gateways - 1)
    since, has, begun = dict.fromkeys(map(str, range(gateways)), 0.0), set[str](), 0
    for _ in range(int(PATIENCE_S) * gateways * 4):
        uses = {one: GatewayUse(one in has, one in has, 1, at_s) for one, at_s in since.items()}
        for one in uses:
            share = share_of(one, "f", limit, uses)
            begun += bool(share) and one not in has
            since[one] = since[one] + 1 if (one in has) == bool(share) else 0.0
            (has.add if share else has.discard)(one)
        assert len(has) <= limit
        assert all(since[one] <= (PATIENCE_S + 2) * gateways for one in since.keys() - has)
    # Each gateway keeps its worker for a while, so gateways do not start workers all the time.
    assert begun <= 4 * gateways * limit

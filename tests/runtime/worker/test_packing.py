"""Packing: a pure function."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.worker.packing import pack

COSTS = st.lists(st.integers(1, 1000).map(float), max_size=60)
MAX_COST = st.none() | st.integers(1, 3000).map(float)


@given(COSTS, st.integers(1, 40), MAX_COST)
def test_every_item_is_in_one_pack_within_both_limits(
    costs: list[float], max_size: int, max_cost: float | None
) -> None:
    packed = pack(costs, max_size, max_cost)
    assert sorted(index for one in packed for index in one) == list(range(len(costs)))
    for one in packed:
        assert 1 <= len(one) <= max_size
        assert max_cost is None or len(one) == 1 or sum(costs[index] for index in one) <= max_cost


@given(COSTS, st.integers(1, 40), MAX_COST)
def test_what_is_split_is_sorted_and_what_fits_keeps_its_order(
    costs: list[float], max_size: int, max_cost: float | None
) -> None:
    packed = pack(costs, max_size, max_cost)
    if len(packed) == 1:
        assert packed == [list(range(len(costs)))]
    flat = [costs[index] for one in packed for index in one]
    assert len(packed) == 1 or flat == sorted(costs)


@given(COSTS, st.integers(1, 40), MAX_COST)
def test_no_pack_could_have_taken_the_next_one(
    costs: list[float], max_size: int, max_cost: float | None
) -> None:
    for one, following in pairwise(pack(costs, max_size, max_cost)):
        grown = [*one, following[0]]
        assert len(grown) > max_size or sum(costs[index] for index in grown) > (max_cost or float("inf"))


def test_neighbours_in_cost_go_together_and_a_giant_goes_alone() -> None:
    assert pack([9.0, 1.0, 50.0, 8.0, 2.0], 2, 20.0) == [[1, 4], [3, 0], [2]]
    assert pack([], 4) == []

"""What a function uses: sums, prices, and the time on each rung."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.billing.usage import FIGURES, Footprint, Prices, RungClock, Usage, priced
from pilotflame.runtime.ground.telemetry.rung_name import RungName

FIGURE = st.integers(0, 1_000_000).map(float)
USAGES = st.builds(Usage, **dict.fromkeys(FIGURES, FIGURE))
RAW = ("busy_s", "idle_s", "starting_s", "occupied_s", "zygote_s", "local_s")
USED = st.builds(Usage, **dict.fromkeys(RAW, FIGURE))
HELD = st.builds(Footprint, *[st.floats(0, 100)] * 3, st.sampled_from([0.0, 1.0]), st.floats(0, 100))
PRICES = st.builds(Prices, *[st.floats(0, 100)] * 3)


@given(USAGES, USAGES)
def test_what_was_added_can_be_taken_away(one: Usage, other: Usage) -> None:
    assert one + other - other == one
    assert one + other == other + one
    assert one + Usage() == one


@given(USED, USED, HELD, PRICES)
def test_parts_cost_as_much_as_the_whole(
    one: Usage, other: Usage, footprint: Footprint, prices: Prices
) -> None:
    whole, parts = (
        priced(one + other, footprint, prices),
        priced(one, footprint, prices) + priced(other, footprint, prices),
    )
    assert parts.cost == pytest.approx(whole.cost)
    assert parts.memory_gb_s == pytest.approx(whole.memory_gb_s)


@given(USED, HELD, PRICES)
def test_what_is_held_is_a_part_of_what_is_paid(used: Usage, footprint: Footprint, prices: Prices) -> None:
    found = priced(used, footprint, prices)
    assert 0 <= found.holding_cost <= found.cost * (1 + 1e-9)
    assert 0 <= found.holding_gb_s <= found.memory_gb_s * (1 + 1e-9)
    resting = priced(replace(used, busy_s=0.0, starting_s=0.0), footprint, prices)
    assert resting.holding_cost == pytest.approx(resting.cost)


@given(USED, HELD, PRICES)
def test_nothing_is_cheaper_when_it_is_always_on(used: Usage, footprint: Footprint, prices: Prices) -> None:
    found = priced(used, footprint, prices)
    assert 0 <= found.cost <= found.always_on_cost * (1 + 1e-9)


def test_a_day_with_an_hour_of_work_costs_what_the_list_says() -> None:
    # One worker of 2 GB for an hour, a zygote of 0.1 GB for this hour and 4 more hours, and files of 5 GB all day.
    used = Usage(
        busy_s=1800, idle_s=1700, starting_s=100, occupied_s=3600, zygote_s=4 * 3600, local_s=19 * 3600
    )
    found = priced(used, Footprint(2.0, 0.1, 5.0), Prices(memory_gb_hour=0.01, disk_gb_hour=0.001))
    assert found.memory_gb_s == pytest.approx((2.0 + 5 * 0.1) * 3600)
    assert found.cost == pytest.approx(2.5 * 0.01 + 24 * 5 * 0.001)
    assert found.always_on_cost == pytest.approx(24 * 2.1 * 0.01 + 24 * 5 * 0.001)
    # Holding is the worker's idle time, the zygote and the files. The worker's busy and starting time is not holding.
    assert found.holding_gb_s == pytest.approx(1700 * 2.0 + 5 * 3600 * 0.1)
    assert found.cost - found.holding_cost == pytest.approx(1900 / 3600 * 2.0 * 0.01)
    # While the worker runs, the zygote's share of the common pages is smaller.
    shared = priced(used, Footprint(2.0, 0.1, 5.0, beside_gb=0.06), Prices())
    assert shared.memory_gb_s == pytest.approx((2.0 + 0.06 + 4 * 0.1) * 3600)
    on_device = priced(used, Footprint(devices=1.0), Prices(device_hour=3.0))
    assert (on_device.device_s, on_device.cost) == (3600, pytest.approx(3.0))
    assert on_device.always_on_cost == pytest.approx(24 * 3.0)


@given(
    st.lists(st.tuples(st.sampled_from(list(RungName)), st.integers(0, 100)), max_size=20),
    st.integers(0, 100),
)
def test_the_times_on_the_rungs_are_all_the_time(moves: list[tuple[RungName, int]], last_s: int) -> None:
    clock, now_s, on = RungClock(1000.0), 1000.0, dict.fromkeys(RungName, 0.0)
    standing = RungName.LOCAL
    for rung, after_s in moves:
        now_s, on[standing] = now_s + after_s, on[standing] + after_s
        clock.move(rung, now_s)
        standing = rung
    on[standing] += last_s
    assert {rung: clock.seconds(rung, now_s + last_s) for rung in RungName} == on

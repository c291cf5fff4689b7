"""The price that follows from a share of slow requests: its bounds, its direction, and that the share is reached."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.keep_alive import History, choose, learn
from pilotflame.runtime.node.scaling.ladder import BurstWait, IdlePlan, Ladder, Rung
from pilotflame.runtime.node.scaling.rung_figures import differs
from pilotflame.runtime.node.scaling.slow_share import MOST_DOUBLINGS, MOST_STEP, SlowShare

targets = st.floats(1e-4, 0.9)
periods = st.lists(st.tuples(st.integers(-5, 10_000), st.integers(-5, 100_000)), max_size=60)


def taught(target: float, counts: list[tuple[int, int]]) -> SlowShare:
    found = SlowShare()
    for slow, requests in counts:
        found = found.learn(target, slow, requests)
    return found


@given(targets, periods, st.just(0.0) | st.floats(1e-12, 1e3))
def test_whatever_comes_the_price_is_bounded_and_the_share_is_one(
    target: float, counts: list[tuple[int, int]], usual: float
) -> None:
    found = taught(target, counts)
    assert abs(found.doublings) <= MOST_DOUBLINGS
    assert found.burst >= 1
    assert 0 < found.price(usual) < math.inf
    assert found.share is None or 0 <= found.share <= 1


@given(targets, periods, st.integers(0, 1000), st.integers(1, 100_000))
def test_the_price_rises_just_where_more_is_slow_than_allowed(
    target: float, counts: list[tuple[int, int]], slow: int, requests: int
) -> None:
    before = taught(target, counts)
    after = before.learn(target, slow, requests)
    excess = min(slow, requests) - target * requests
    step = after.doublings - before.doublings
    assert step * excess >= 0
    assert abs(step) <= MOST_STEP + 1e-9
    if abs(excess) > 1e-6 and abs(before.doublings) < MOST_DOUBLINGS - MOST_STEP:
        assert step != 0
    assert before.learn(target, slow, 0) == before


@settings(max_examples=20)
@given(
    st.integers(0, 10**6), st.floats(0.01, 0.3), st.floats(0.02, 50), st.floats(0.5, 2.0), st.integers(1, 20)
)
def test_the_share_comes_true_where_a_higher_price_makes_fewer_requests_slow(
    seed: int, target: float, scale: float, slope: float, most: int
) -> None:
    """The higher the price is, the longer a worker stays idle. The controller does not know the formula."""
    chance, state, slow, requests = random.Random(seed), SlowShare(), 0, 0
    for number in range(1500):
        timeout_s = scale * (state.price(0.001) / 0.001) ** slope
        arrived = chance.randint(1, most)
        late = min(arrived, chance.randint(1, 3)) if chance.expovariate(1.0) > timeout_s else 0
        state = state.learn(target, late, arrived)
        if number >= 500:
            slow, requests = slow + late, requests + arrived
    # The share may stay below the target if many requests come together: one cold start per period does not reach it.
    # Few slow requests are counted, so chance moves the share by some standard deviations.
    chance_share = 3 * math.sqrt(target / requests)
    if slow / requests < target:
        assert state.doublings < 0 or slow / requests >= 0.8 * target - chance_share
    assert slow / requests <= 1.2 * target + 3 / math.sqrt(requests)


def rung_at(plan: IdlePlan, idle_s: float) -> int:
    return [step.rung for step in plan if step.offset_s <= idle_s][-1]


def long_and_short(chance: random.Random) -> float:
    return chance.expovariate(1 / 400) if chance.random() < 0.3 else chance.expovariate(1 / 20)


SLICE = (Rung(1e-4, 0), Rung(1e-5, 0.08), Rung(1.5e-6, 2.2), Rung(4.5e-8, 7))
TWO = (Rung(1e-4, 0), Rung(0, 7))


@pytest.mark.parametrize("rungs", [SLICE, TWO])
@pytest.mark.parametrize("gap", [lambda chance: chance.expovariate(1 / 60), long_and_short])
def test_with_the_policy_itself_as_many_requests_are_slow_as_allowed(
    rungs: tuple[Rung, ...], gap: Callable[[random.Random], float]
) -> None:
    chance, target = random.Random(7), 0.05
    state, history, found = SlowShare(), History(), list[tuple[int, int]]()
    ladder = Ladder(rungs, state.price(0.001))
    for _ in range(500):
        idle_s = gap(chance)
        slow = int(rung_at(choose(history, ladder, 0.0).plan, idle_s) > 0)
        found.append((slow, 1 + int(chance.expovariate(1 / 3))))
        history = learn(history, ladder, idle_s, 0.0, [BurstWait(rung.wake_s, 1) for rung in rungs])
        state = state.learn(target, *found[-1])
        if differs(ladder, measured := Ladder(rungs, state.price(0.001))):
            ladder, history = measured, history.unplanned()
    slow, requests = (sum(column) for column in zip(*found[150:], strict=True))
    assert slow / requests == pytest.approx(target, rel=0.25)


def test_the_displayed_share_forgets_half_in_a_thousand_requests() -> None:
    found = taught(0.1, [(1000, 1000), (0, 1000)])
    assert found.share == pytest.approx(500 / 1500)
    assert found.learn(0.1, 0, 1).recent == pytest.approx(1500 * 0.5**0.001 + 1)

"""Functions that are called after others: the learned delays, and when a worker should wait for the call."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from operator import mul

import pytest
from example_count import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.ladder import Step
from pilotflame.runtime.node.scaling.upstream import (
    BOUNDS_S,
    HORIZON_S,
    MOST_FOLLOWERS,
    MOST_UPSTREAMS,
    ClimbCost,
    Delays,
    Upstreams,
    Window,
    ready_shares,
)

# A worker of 0.45 GB that takes 2 s to start, at the prices of reference/policy.md.
COST = ClimbCost(hold_per_s=1.3e-6, saved=2e-3, wake_s=2.0)


def window_of(upstreams: Upstreams, upstream: str, follower: str, cost: ClimbCost = COST) -> Window | None:
    """Return when a worker of `follower` should wait after the call of `upstream` that was noted last."""
    found = dict(upstreams.followers(upstream)).get(follower)
    return found.best_window(cost, interval_s=upstreams.interval_s(follower)) if found is not None else None


def rounds(
    seed: int, *, mean_s: float, spread: float, followed: float
) -> Iterator[tuple[float, float | None]]:
    """Yield the time of each call of the upstream function, and the delay of the other function's call, or None without one."""
    chance, now_s = random.Random(seed), 1000.0
    for _ in range(200):
        now_s += HORIZON_S + chance.expovariate(1 / 600)
        delay_s = mean_s * chance.lognormvariate(0, spread)
        yield now_s, delay_s if chance.random() < followed else None


@given(st.integers(0, 10**6), st.floats(0.3, 30), st.floats(0, 0.4), st.floats(0.9, 1.0))
def test_after_twenty_rounds_few_calls_are_cold(seed: int, mean_s: float, spread: float, followed: float):
    upstreams, cold, calls = Upstreams(), 0, 0
    for number, (now_s, delay_s) in enumerate(rounds(seed, mean_s=mean_s, spread=spread, followed=followed)):
        upstreams.note("a", now_s)
        window = window_of(upstreams, "a", "b")
        if delay_s is None:
            continue
        upstreams.note("b", now_s + delay_s)
        if number >= 20:
            calls += 1
            # A start that had no time to end makes the call cold, too.
            ready_s = 0.0 if window is None else window.from_s + COST.wake_s if window.from_s else 0.0
            cold += window is None or not ready_s <= delay_s <= window.until_s
    assert cold / calls <= 0.1


@given(st.integers(0, 10**6))
def test_calls_that_come_at_any_time_are_waited_for_only_if_that_is_cheap(seed: int):
    chance, upstreams, windows = random.Random(seed), Upstreams(), []
    times = sorted([(chance.uniform(0, 1e6), name) for name in "ab" for _ in range(300)])
    for at_s, name in times:
        upstreams.note(name, at_s)
        if name == "a":
            windows.append(window_of(upstreams, "a", "b", ClimbCost(1e-3, 2e-3, 2.0)))
    # Holding a worker for a minute costs thirty times as much as a call that waits.
    assert not any(window is not None and window.until_s > 10 for window in windows)


@given(
    st.lists(st.floats(0.01, 400), min_size=1, max_size=40),
    st.floats(0, 1e-2),
    st.floats(0, 1),
    st.floats(0, 20),
)
def test_a_window_is_worth_what_it_costs(delays_s: list[float], hold: float, saved: float, wake_s: float):
    delays = Delays()
    for delay_s in delays_s:
        delays.note_hit(delay_s)
        delays.note_call()
    window = delays.best_window(ClimbCost(hold, saved, wake_s))
    if window is not None:
        assert 0 <= window.from_s < window.until_s <= HORIZON_S * 1.25
        assert 0 < window.probability <= 1
        # A window that pays still pays if holding costs less, or if a prewarm saves more.
        assert delays.best_window(ClimbCost(hold / 2, saved, wake_s)) is not None
        assert delays.best_window(ClimbCost(hold, saved * 2, wake_s)) is not None
    elif delays.known:
        assert delays.best_window(ClimbCost(hold * 2 + 1e-9, saved, wake_s)) is None


@settings(max_examples=examples(15))
@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(0.2, 20))
def test_functions_that_are_called_in_any_order_start_no_workers_of_each_other(
    seed: int, functions: int, pause_s: float
) -> None:
    chance, upstreams, windows, calls, now_s = random.Random(seed), Upstreams(), 0, 40 * functions, 0.0
    # Holding a worker costs nearly nothing, so only the missing relation prevents windows.
    cost = ClimbCost(1e-9, 2e-3, 0.005)
    for _ in range(calls):
        now_s += chance.expovariate(1 / pause_s)
        name = f"f{chance.randrange(functions)}"
        upstreams.note(name, now_s)
        windows += sum(
            window_of(upstreams, name, follower, cost) is not None
            for follower, _ in upstreams.followers(name)
        )
    assert windows < calls / 4


def test_bounds_without_hits_hold_no_memory() -> None:
    delays = Delays()
    delays.note_hit(20.0)
    delays.note_call()
    assert len({id(hit) for hit in delays.hits}) == 2


def test_no_window_is_opened_for_calls_that_the_plan_meets_ready_anyway():
    """The first function of a chain is called after the last one, but its own timer prewarms it anyway."""
    delays = Delays()
    for _ in range(20):
        delays.note_hit(20.0)
        delays.note_call()
    wakes = (0.0, 2.0)
    ready = (Step(0.0, 1), Step(12.0, 0), Step(45.0, 1))
    assert delays.best_window(COST, ready_shares(ready, wakes, 0.0)) is None
    # The window pays if the prewarm of the plan has passed, or comes too late.
    assert delays.best_window(COST, ready_shares(ready, wakes, 40.0)) is not None
    assert delays.best_window(COST, ready_shares((Step(0.0, 1), Step(60.0, 0)), wakes, 0.0)) is not None


@given(st.floats(0, 400), st.floats(0, 400), st.floats(0, 100))
def test_the_shares_of_delays_with_a_worker_add_up_to_the_time_that_the_plan_holds_one(
    climb_s: float, hold_s: float, elapsed_s: float
):
    plan = (Step(0.0, 1), Step(climb_s, 0), Step(climb_s + 2.0 + hold_s, 1))
    shares = ready_shares(plan, (0.0, 2.0), elapsed_s)
    lengths_s = [end_s - begin_s for begin_s, end_s in pairwise((0.0, *BOUNDS_S))]
    from_s, until_s = climb_s + 2.0 - elapsed_s, climb_s + 2.0 + hold_s - elapsed_s
    held_s = max(0.0, min(until_s, HORIZON_S) - max(0.0, min(from_s, HORIZON_S)))
    assert sum(map(mul, shares, lengths_s)) == pytest.approx(held_s, abs=1e-6)
    assert all(0 <= share <= 1 + 1e-9 for share in shares)


def test_three_rounds_are_enough_and_two_are_not():
    upstreams = Upstreams()
    for number in range(4):
        upstreams.note("a", number * 100.0)
        window = window_of(upstreams, "a", "b")
        assert (window is not None) == (number >= 3)
        upstreams.note("b", number * 100.0 + 5)
    assert window is not None
    assert window.from_s < 5 - COST.wake_s
    assert 5 < window.until_s < 12


def test_a_habit_that_ends_is_forgotten():
    upstreams = Upstreams()
    for number in range(40):
        upstreams.note("a", number * 1000.0)
        upstreams.note("b", number * 1000.0 + 5)
    for number in range(40, 200):
        upstreams.note("a", number * 1000.0)
    assert window_of(upstreams, "a", "b") is None


def test_the_one_that_comes_first_follows_nobody():
    upstreams = Upstreams()
    for number in range(20):
        upstreams.note("a", number * 1000.0)
        upstreams.note("b", number * 1000.0 + 5)
    assert window_of(upstreams, "b", "a") is None
    assert window_of(upstreams, "a", "b") is not None


def test_a_chain_is_known_from_its_beginning():
    upstreams = Upstreams()
    for number in range(10):
        for place, name in enumerate("abc"):
            upstreams.note(name, number * 1000.0 + place * 20)
    assert window_of(upstreams, "a", "c") is not None
    assert window_of(upstreams, "b", "c") is not None


def test_those_who_are_called_all_the_time_teach_nothing():
    upstreams = Upstreams()
    for number in range(1000):
        upstreams.note("ab"[number % 2], number * 0.4)
    assert list(upstreams.followers("a")) == []


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 200)), max_size=300))
def test_memory_is_bounded_whatever_is_called(calls: list[tuple[int, float]]):
    upstreams, now_s = Upstreams(), 0.0
    for number, pause_s in calls:
        now_s += pause_s
        upstreams.note(f"f{number}", now_s)
    for number in range(61):
        name = f"f{number}"
        upstream_of = [other for other in range(61) if upstreams.delays(name, f"f{other}") is not None]
        follower_of = [other for other in range(61) if upstreams.delays(f"f{other}", name) is not None]
        assert len(upstream_of) <= MOST_UPSTREAMS
        assert len(follower_of) <= MOST_FOLLOWERS
        assert number not in upstream_of
    for number in range(61):
        upstreams.forget(f"f{number}")
    assert all(upstreams.delays(f"f{one}", f"f{other}") is None for one in range(61) for other in range(61))


def test_what_is_adopted_goes_on_and_is_kept_up_to_date() -> None:
    first, again, pairs = Upstreams(), Upstreams(), dict[str, Delays]()
    first.adopt("b", pairs)
    for number in range(4):
        first.note("a", number * 1000.0)
        first.note("b", number * 1000.0 + 5)
    again.adopt("b", pairs)
    assert window_of(again, "a", "b") == window_of(first, "a", "b") is not None
    again.forget("a")
    assert "a" not in pairs

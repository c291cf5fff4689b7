"""The decision about a budget, for all budgets and all amounts of usage."""

import math

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pilotflame.runtime.ground.billing.budget import (
    DAY_S,
    LEAST_WAIT_S,
    WARN_AT,
    BudgetSpec,
    BudgetState,
    Spending,
    day_left_s,
    day_of,
    decide_budget,
)

AMOUNTS = st.floats(0, 1e6)
LIMITS = st.none() | st.floats(1e-3, 1e6)
SPECS = st.builds(BudgetSpec, LIMITS, LIMITS)
SPENDINGS = st.builds(Spending, AMOUNTS, AMOUNTS)
LEFT = st.floats(0, DAY_S)
ORDER = list(BudgetState)


@given(SPECS, SPENDINGS, SPENDINGS, LEFT)
def test_it_is_exhausted_exactly_when_a_limit_is_reached(
    spec: BudgetSpec, spent: Spending, rate: Spending, left_s: float
) -> None:
    state = decide_budget(spec, spent, rate, left_s).state
    limits = [
        (limit, used)
        for limit, used in zip((spec.money_per_day, spec.seconds_per_day), spent, strict=True)
        if limit
    ]
    # Between these two conditions, rounding decides whether the limit is reached.
    if any(used >= limit for limit, used in limits):
        assert state is BudgetState.EXHAUSTED
    elif all(used < limit * (1 - 1e-6) for limit, used in limits):
        assert state is not BudgetState.EXHAUSTED
        warned = any(used >= limit * WARN_AT for limit, used in limits)
        near = any(math.isclose(used, limit * WARN_AT, rel_tol=1e-6) for limit, used in limits)
        assert near or (state is BudgetState.WARNED) == warned


@given(SPECS, SPENDINGS, SPENDINGS, SPENDINGS, LEFT)
def test_who_uses_more_is_never_further_from_the_limit(
    spec: BudgetSpec, spent: Spending, more: Spending, rate: Spending, left_s: float
) -> None:
    before = decide_budget(spec, spent, rate, left_s)
    after = decide_budget(
        spec, Spending(spent.money + more.money, spent.seconds + more.seconds), rate, left_s
    )
    assert ORDER.index(after.state) >= ORDER.index(before.state)
    assert after.share >= before.share


# `assume` rejects many examples, because the day ends before the state changes.
@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(SPECS, SPENDINGS, SPENDINGS, st.floats(1.0, DAY_S))
def test_at_the_next_look_the_state_has_just_changed_and_never_before(
    spec: BudgetSpec, spent: Spending, rate: Spending, left_s: float
) -> None:
    now = decide_budget(spec, spent, rate, left_s)
    assume(now.again_in_s is not None and now.again_in_s < left_s)
    assert now.again_in_s is not None

    def after(wait_s: float) -> BudgetState:
        used = Spending(spent.money + wait_s * rate.money, spent.seconds + wait_s * rate.seconds)
        return decide_budget(spec, used, rate, left_s - wait_s).state

    assert after(max(0.0, now.again_in_s * (1 - 1e-3) - LEAST_WAIT_S)) is now.state
    assert ORDER.index(after(now.again_in_s * (1 + 1e-6) + 1e-6)) > ORDER.index(now.state)


@given(SPECS, SPENDINGS, SPENDINGS, LEFT)
def test_an_exhausted_budget_is_looked_at_when_the_day_ends(
    spec: BudgetSpec, spent: Spending, rate: Spending, left_s: float
) -> None:
    found = decide_budget(spec, spent, rate, left_s)
    assume(found.state is BudgetState.EXHAUSTED)
    assert found.again_in_s == max(LEAST_WAIT_S, left_s)


@given(SPENDINGS, SPENDINGS, LEFT)
def test_without_limits_nothing_is_ever_looked_at(spent: Spending, rate: Spending, left_s: float) -> None:
    assert decide_budget(BudgetSpec(), spent, rate, left_s) == (BudgetState.WITHIN, 0.0, None)


def test_an_unused_budget_of_a_function_at_zero_needs_no_timer() -> None:
    assert decide_budget(BudgetSpec(seconds_per_day=5), Spending(), Spending(), 100.0).again_in_s is None


@given(st.floats(0, 4e9))
def test_days_are_those_of_utc(now_s: float) -> None:
    assert 0 < day_left_s(day_of(now_s), now_s) <= DAY_S
    assert day_of(now_s + day_left_s(day_of(now_s), now_s)) == day_of(now_s) + 1
    assert day_of(1_795_305_600.0) == 20_779
    assert day_left_s(20_779, 1_795_305_600.0) == pytest.approx(DAY_S)

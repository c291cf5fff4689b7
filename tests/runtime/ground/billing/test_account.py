"""The account of one function: sums over its revisions, the first measurement, and the end of a day."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from pilotflame.runtime.ground.billing.account import Account, StoredUsage
from pilotflame.runtime.ground.billing.budget import BudgetSpec, BudgetState
from pilotflame.runtime.ground.billing.usage import Footprint, Prices, Usage

pytestmark = pytest.mark.asyncio

DAY = 20_779 * 86400.0


class Clock(SimpleNamespace):
    """A wall clock and a monotonic clock that the test moves. `behind_s` sets the wall clock back."""

    def __init__(self, at: float) -> None:
        super().__init__(at=at, behind_s=0.0, time=lambda: self.at - self.behind_s, monotonic=lambda: self.at)


class Workers:
    """A revision that has had `workers` workers since its start, all of them busy."""

    def __init__(self, clock: Clock, workers: int) -> None:
        self.worker_total, self.told = workers, list[bool]()
        self._clock, self._since_s = clock, clock.at

    def usage(self, now_s: float) -> Usage:
        seconds = now_s - self._since_s
        return Usage(busy_s=seconds * self.worker_total, occupied_s=seconds)

    def on_budget(self, *, changed: bool) -> None:
        if changed:
            self.told.append(changed)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(DAY + 3600)
    monkeypatch.setattr("pilotflame.runtime.ground.billing.account.time", clock)
    return clock


async def test_what_was_used_before_a_change_of_owner_is_the_last_owners(clock: Clock):
    colds = [Usage(cold_starts=2)]
    account = Account("f", Prices(), counted=lambda: colds.pop() if colds else Usage())
    account.attach(Workers(clock, 1))
    clock.at += 3
    # The first deploy has run a worker before the function was live. The first owner pays for it.
    account.open(BudgetSpec(), "old")
    clock.at += 10
    colds.append(Usage(cold_starts=1))
    account.open(BudgetSpec(), "new")
    clock.at += 4
    account.settle()
    owed = account.to_write()
    assert {owner: (used.busy_s, used.cold_starts) for owner, used in owed.items()} == {
        "old": (13, 3),
        "new": (4, 0),
    }
    for owner, used in owed.items():
        account.unwritten.written(owner, used)
    account.unwritten.add("old", owed["old"])
    assert account.to_write() == {"old": owed["old"], "new": Usage()}


async def test_what_a_failed_first_deploy_has_used_is_nobodys(clock: Clock):
    account = Account("f", Prices())
    account.attach(failed := Workers(clock, 1))
    clock.at += 3
    account.settle()
    assert account.to_write() == {}
    clock.at += 2
    account.detach(failed)
    account.attach(live := Workers(clock, 1))
    clock.at += 4
    account.open(BudgetSpec(), "key")
    assert {owner: used.busy_s for owner, used in account.to_write().items()} == {"key": 4}
    account.detach(live)


async def test_what_revisions_have_used_stays_when_they_end(clock: Clock):
    account = Account("f", Prices(), StoredUsage(Usage(busy_s=100)))
    account.open(BudgetSpec(), "")
    old, new = Workers(clock, 2), Workers(clock, 1)
    account.attach(old)
    account.attach(new)
    clock.at += 10
    account.detach(old)
    clock.at += 5
    account.settle()
    assert account.total.busy_s == account.to_write()[""].busy_s == 2 * 10 + 15
    assert account.today.busy_s == 135
    account.detach(new)
    account.detach(new)
    clock.at += 100
    account.settle()
    assert account.total.busy_s == 35
    account.unwritten.written("", account.to_write()[""])
    assert account.to_write() == {}


async def test_what_was_used_before_the_first_measurement_is_priced_then(clock: Clock):
    account = Account("f", Prices(memory_gb_hour=1.0))
    account.attach(Workers(clock, 1))
    clock.at += 1800
    account.settle()
    assert account.today.cost == 0
    clock.at += 1800
    account.measured(Footprint(worker_gb=2.0))
    assert account.today.cost == pytest.approx(2.0)
    clock.at += 3600
    account.measured(Footprint(worker_gb=4.0))
    assert account.today.cost == pytest.approx(4.0)
    clock.at += 3600
    account.settle()
    assert account.today.cost == pytest.approx(8.0)


async def test_a_new_day_begins_with_the_whole_budget_also_if_the_timer_is_late(clock: Clock):
    account, workers = Account("f", Prices()), Workers(clock, 1)
    account.attach(workers)
    account.open(BudgetSpec(seconds_per_day=60), "key")
    clock.at += 61
    account.check()
    assert (account.state, workers.told) == (BudgetState.EXHAUSTED, [True])
    assert account.refusal().details["retry_after_s"] == DAY + 86400 - clock.at
    account.forgive()
    assert account.state is BudgetState.WITHIN
    clock.at += 60
    account.check()
    assert account.exhausted
    # The workers end, and the function stays at zero.
    account.detach(workers)
    account.attach(resting := Workers(clock, 0))
    clock.at = DAY + 86400.5
    # `settle` has not run since midnight. A job that waits for the next day must not wait for the day after it.
    assert account.refusal().details["retry_after_s"] < 1
    account.settle()
    await asyncio.sleep(0)
    assert account.state is BudgetState.WITHIN
    assert account.spent.seconds == 0
    account.detach(resting)


async def test_a_clock_that_is_set_back_renews_no_budget(clock: Clock):
    account, workers = Account("f", Prices()), Workers(clock, 1)
    account.attach(workers)
    account.open(BudgetSpec(seconds_per_day=60), "key")
    clock.at += 61
    account.check()
    for clock.behind_s in (7200.0, 0.0):
        account.check()
        assert account.exhausted
        assert account.refusal().details["retry_after_s"] == DAY + 86400 - clock.time()
    clock.at = DAY + 86400.5
    account.check()
    assert account.state is BudgetState.WITHIN


async def test_after_a_clock_was_wrong_by_days_the_next_midnight_renews_the_budget(clock: Clock):
    account, workers = Account("f", Prices()), Workers(clock, 1)
    account.attach(workers)
    account.open(BudgetSpec(seconds_per_day=60), "key")
    clock.at += 61
    account.check()
    clock.behind_s = 300 * 86400
    account.check()
    assert account.exhausted
    clock.at += 86400
    account.check()
    assert account.state is BudgetState.WITHIN


async def test_the_last_minute_of_a_day_does_not_count_against_the_next(clock: Clock):
    account = Account("f", Prices())
    clock.at = DAY + 86400 - 50
    account.attach(Workers(clock, 1))
    account.open(BudgetSpec(seconds_per_day=30), "key")
    clock.at = DAY + 86400.25
    account.settle()
    assert account.total.busy_s == account.to_write()["key"].busy_s == 50.25
    assert account.spent.seconds == 0
    clock.at += 20
    account.check()
    assert (account.spent.seconds, account.state) == (20, BudgetState.WITHIN)


async def test_a_budget_that_is_not_used_up_is_not_forgiven(clock: Clock):
    account = Account("f", Prices())
    account.attach(Workers(clock, 1))
    account.open(BudgetSpec(seconds_per_day=60), "key")
    clock.at += 50
    account.forgive()
    account.settle()
    assert account.spent.seconds == 50
    assert "50 of 60 (seconds_per_day)" in account.describe()


async def test_a_function_of_the_same_name_uses_nothing_on_the_account_of_the_deleted_ones_owner(
    clock: Clock,
):
    account = Account("f", Prices())
    account.attach(before := Workers(clock, 1))
    account.open(BudgetSpec(), "old")
    clock.at += 20
    account.detach(before)
    account.note_removed()
    # The start-up check of the new function runs before the function is live. The new owner pays for it.
    account.attach(after := Workers(clock, 1))
    clock.at += 7
    account.open(BudgetSpec(), "new")
    assert {owner: used.busy_s for owner, used in account.to_write().items()} == {"old": 20, "new": 7}
    account.detach(after)

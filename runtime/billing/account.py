"""Adds up what a function uses, over all its revisions, and tells them when the budget of its day is used up."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from ...errors import BudgetExhausted
from .budget import LEAST_WAIT_S, BudgetSpec, BudgetState, Spending, day_left_s, day_of, decide_budget
from .usage import HOUR_S, Holding, Prices, Usage, priced

# The wall clock may be set, and the machine may sleep: a timer for the end of the day is set anew after this time.
LONGEST_TIMER_S = 3600.0


class StoredUsage(NamedTuple):
    """What is known of a function from before: its usage of today, how much of that does not count, what it holds."""

    today: Usage = Usage()
    forgiven: Spending = Spending()
    holding: Holding = Holding()


NOTHING = StoredUsage()


class Spender(Protocol):
    """A revision, as the account of its function sees it."""

    @property
    def held_workers(self) -> int:
        """The number of its workers, also of those that are being started."""

    def usage(self, now_s: float) -> Usage:
        """Return what its workers and its zygote have used so far."""

    def on_budget(self, *, changed: bool) -> None:
        """The budget was looked at. If it is used up, stop; `changed` tells whether its state is a new one."""


class Account:
    """What one function has used: since the gateway started, today, and what is not yet stored.

    Nothing is counted here for an invocation: the sums that revisions have anyway are read when they are needed.
    """

    def __init__(
        self, function: str, prices: Prices, stored: StoredUsage = NOTHING, counted: Callable[[], Usage] = Usage
    ) -> None:  # fmt: skip
        """`stored` is what an earlier run of the gateway has stored of today. `counted` returns what others have
        counted of the function since its last call."""
        self.total = Usage()
        self.today, self.forgiven, self.holding = stored
        self.day = day_of(time.time())
        self.owner: str | None = None
        """The owner of the live revision; None before the first is live, and after the function was deleted."""
        # By owner: a deploy may change the owner before all is stored.
        self._unwritten: dict[str | None, Usage] = {}
        self._counted = counted
        self.state = BudgetState.WITHIN
        self.share = 0.0
        """The used share of the limit that is reached first."""
        self._function, self._prices = function, prices
        self._budget = BudgetSpec()
        self._spenders: list[Spender] = []
        self._past = self._settled = self._unmeasured = Usage()
        self.due_s = math.inf
        """When to decide again (monotonic). The reconciler looks at the revisions then."""
        # The day on which its last revision has ended.
        self._ended_on = self.day

    # -- who uses

    def attach(self, spender: Spender) -> None:
        self._spenders.append(spender)

    def detach(self, spender: Spender) -> None:
        """Keep what a revision has used: it has ended."""
        if spender in self._spenders:
            self._past += spender.usage(time.monotonic())
            self._spenders.remove(spender)
            self._ended_on = day_of(time.time())
        if not self._spenders and self.owner is None:
            # The first deploy of the function has failed: there is no function that has used this.
            self.settle()
            self._unwritten.pop(None, None)

    def note_removed(self) -> None:
        """Learn that the function was deleted: the next one of its name may be another owner's."""
        self.settle()
        self.owner = None

    def is_over(self, day: int) -> bool:
        """Return True if the function was deleted before that day, and all that it used is stored.

        Until then, a function of this name goes on with what is used of the budget.
        """
        return not self._spenders and self._ended_on < day and not self._unwritten

    # -- what is used

    def settle(self) -> None:
        """Add to the sums what was used since the last time. It counts for the day of that time."""
        now_s, used = time.monotonic(), self._past
        for spender in self._spenders:
            used += spender.usage(now_s)
        news, self._settled = used - self._settled, used
        if not self.holding.worker_gb:
            self._unmeasured += news
        self._add(priced(news, self.holding, self._prices) + self._counted())
        if (day := day_of(time.time())) != self.day:
            self.day, self.today, self.forgiven, self._unmeasured = day, Usage(), Spending(), Usage()
            # Nobody is refused until the timer fires: it may be late, since the wall clock may be set.
            asyncio.get_running_loop().call_soon(self.check)

    def _add(self, used: Usage) -> None:
        self.total, self.today = self.total + used, self.today + used
        self._owe(self.owner, used)

    def measured(self, holding: Holding) -> None:
        """Learn how much the function holds. What its workers used today before the first measurement is priced now."""
        self.settle()
        before, self.holding = self.holding, holding
        if holding.worker_gb:
            owed, self._unmeasured = self._unmeasured, Usage()
            self._add(priced(owed, holding, self._prices) - priced(owed, before, self._prices))
        self.check()

    def unwritten(self) -> Mapping[str, Usage]:
        """Return what is not yet stored, by owner; what the present one has used, also if it is nothing.

        What a first deploy uses has no owner before its revision is live.
        """
        present = {self.owner: Usage()} if self._spenders else {}
        return {owner: used for owner, used in (present | self._unwritten).items() if owner is not None}

    def written(self, owner: str, used: Usage) -> None:
        """Learn that so much of `unwritten` is being stored."""
        if self._unwritten.get(owner) is used:
            del self._unwritten[owner]
        else:
            self._owe(owner, Usage() - used)

    def not_written(self, owner: str, used: Usage) -> None:
        """Learn that this could not be stored."""
        self._owe(owner, used)

    def _owe(self, owner: str | None, used: Usage) -> None:
        owed = self._unwritten.pop(owner, Usage()) + used
        if owed != Usage():
            self._unwritten[owner] = owed

    # -- the budget

    @property
    def exhausted(self) -> bool:
        return self.state is BudgetState.EXHAUSTED

    @property
    def scarce(self) -> bool:
        """True if the owner is to be warned of what is used."""
        return self.state is not BudgetState.WITHIN

    @property
    def limited(self) -> bool:
        return self._budget.money_per_day is not None or self._budget.seconds_per_day is not None

    @property
    def budget(self) -> BudgetSpec:
        return self._budget

    @property
    def spent(self) -> Spending:
        """What counts against today's budget."""
        return Spending(self.today.cost - self.forgiven.money, self.today.worker_s - self.forgiven.seconds)

    def open(self, budget: BudgetSpec, owner: str) -> None:
        """Set the budget and the owner: those of the revision that has become live.

        What was used until now is the last owner's. The first deploy of a function has used it for its own.
        """
        self.settle()
        before, self.owner = self.owner, owner
        if before is None:
            self._owe(owner, self._unwritten.pop(None, Usage()))
        self._budget = budget
        self.check()

    def forgive(self) -> None:
        """If the budget is used up, let the function use all of it once more today."""
        if not self.exhausted:
            return
        self.settle()
        self.forgiven = Spending(self.today.cost, self.today.worker_s)
        self.check()

    def check(self) -> None:
        """Decide whether the function may use more, and when to decide again. Tell its revisions."""
        before, self.due_s = self.state, math.inf
        if not self.limited:
            self.state, self.share = BudgetState.WITHIN, 0.0
        else:
            self.settle()
            left_s = day_left_s(time.time())
            self.state, self.share, again_in_s = decide_budget(self._budget, self.spent, self._rate(), left_s)
            if again_in_s is not None and self._spenders:
                self.due_s = time.monotonic() + min(again_in_s, LONGEST_TIMER_S)
        for spender in list(self._spenders):
            spender.on_budget(changed=self.state is not before)

    def describe(self) -> str:
        """Return in a sentence how much of the budget is used, for the function's log and its status."""
        limits = (self._budget.money_per_day, self._budget.seconds_per_day)
        parts = [
            f"{used:.6g} of {limit:.6g} ({key})"
            for used, limit, key in zip(self.spent, limits, ("money_per_day", "seconds_per_day"), strict=True)
            if limit is not None
        ]
        used = f"{self.share:.0%} of today's budget is used" + (f": {', '.join(parts)}" if parts else "")
        if not self.exhausted:
            return used
        return f"{used}; no worker starts before 0:00 UTC, unless it is raised, or: pilotflame reset {self._function}"

    def refusal(self) -> BudgetExhausted:
        """Return the error of an invocation for which no worker may be started today. It tells no amounts."""
        now = time.time()
        # In the first moment of a new day, the budget was not looked at yet.
        retry_s = day_left_s(now) if day_of(now) == self.day else LEAST_WAIT_S
        return BudgetExhausted(
            f"{self._function} has used its budget for today. The next day begins at 0:00 UTC.",
            remedy=f"Raise [budget] in pilotflame.toml and deploy, or: pilotflame reset {self._function}",
            details={"retry_after_s": round(retry_s, 3)},
        )

    def _rate(self) -> Spending:
        """Return what is used in a second, if no more workers are started."""
        workers, held, prices = sum(one.held_workers for one in self._spenders), self.holding, self._prices
        rest_gb = held.beside_gb if workers else held.rest_gb
        per_h = (workers * held.worker_gb + rest_gb) * prices.memory_gb_hour
        per_h += held.disk_gb * prices.disk_gb_hour + workers * held.devices * prices.device_hour
        return Spending(per_h / HOUR_S, float(workers))

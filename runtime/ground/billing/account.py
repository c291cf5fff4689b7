"""Adds up the usage of a function over all its revisions, and tells the revisions the state of the daily budget."""

from __future__ import annotations

import asyncio
import math
import operator
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ....errors import BudgetExhausted
from .budget import LEAST_WAIT_S, BudgetSpec, BudgetState, Spending, day_left_s, day_of, decide_budget
from .usage import HOUR_S, Footprint, Prices, Usage, priced

# The longest time between two checks of the budget. A timer for the end of the day could fire late, because the wall clock may be set, and
# the machine may sleep.
LONGEST_TIMER_S = 3600.0


class StoredUsage(NamedTuple):
    """The stored figures of a function: its usage of today, the part that the budget forgives, and its footprint."""

    today: Usage = Usage()
    forgiven: Spending = Spending()
    footprint: Footprint = Footprint()


NOTHING = StoredUsage()


class Spender(Protocol):
    """A revision, as the account of its function sees it."""

    @property
    def worker_total(self) -> int:
        """The number of the revision's workers, including starting workers."""

    def usage(self, now_s: float) -> Usage:
        """Return the usage of the revision's workers and zygote so far."""

    def on_budget(self, *, changed: bool) -> None:
        """Stop the work of the revision if the budget is used up. The account calls this after each check of the budget.
        `changed` is True if the check changed the state of the budget.
        """


class UnwrittenUsage:
    """The usage of one function that is not stored yet, by owner: a deploy may change the owner before all of it is stored.

    The usage before a function's first revision is live has no owner.
    """

    def __init__(self) -> None:
        self._owed: dict[str | None, Usage] = {}

    def __bool__(self) -> bool:
        return bool(self._owed)

    def add(self, owner: str | None, used: Usage) -> None:
        """Add usage that is not stored. It may be negative."""
        owed = self._owed.pop(owner, Usage()) + used
        if owed != Usage():
            self._owed[owner] = owed

    def written(self, owner: str, used: Usage) -> None:
        """Record that the part `used` is being stored."""
        self.add(owner, Usage() - used)

    def take_unowned(self) -> Usage:
        """Forget the usage without an owner, and return it."""
        return self._owed.pop(None, Usage())

    def by_owner(self) -> dict[str, Usage]:
        return {owner: used for owner, used in self._owed.items() if owner is not None}


class Account:
    """The usage of one function: since the gateway started, today, and not yet stored.

    An invocation updates no counter here. Each revision keeps sums for other purposes too, and the account reads these
    sums when it needs them.
    """

    def __init__(
        self, function: str, prices: Prices, stored: StoredUsage = NOTHING, counted: Callable[[], Usage] = Usage
    ) -> None:  # fmt: skip
        """`stored` is the usage that an earlier run of the gateway has stored. Other objects count some figures, such
        as cold starts. `counted` returns these figures since its last call.
        """
        self.total = Usage()
        self.today, self.forgiven, self.footprint = stored
        self.day = day_of(time.time())
        self.owner: str | None = None
        """The owner of the live revision; None before the first revision is live, and after the function was deleted."""
        self.unwritten = UnwrittenUsage()
        self._counted = counted
        self.state = BudgetState.WITHIN
        self.share = 0.0
        """The largest used share of a limit of the budget."""
        self._function, self._prices = function, prices
        self._budget = BudgetSpec()
        self._elsewhere = self._reserved = Spending()
        self._spenders: list[Spender] = []
        self._past = self._settled = self._unmeasured = Usage()
        self.due_s = math.inf
        """When to check the budget again, in monotonic seconds. At this time, the reconciler looks at the revisions."""
        # The day on which the function's last revision has ended.
        self._ended_on = self.day

    # -- who uses

    def attach(self, spender: Spender) -> None:
        self._spenders.append(spender)

    def detach(self, spender: Spender) -> None:
        """Add the usage of a revision that has ended to the account."""
        if spender in self._spenders:
            self._past += spender.usage(time.monotonic())
            self._spenders.remove(spender)
            self._ended_on = day_of(time.time())
        if not self._spenders and self.owner is None:
            # The first deploy of the function has failed, so this usage belongs to no function. Drop it.
            self.settle()
            self.unwritten.take_unowned()

    def note_removed(self) -> None:
        """Record that the function was deleted. The next function of this name may have another owner."""
        self.settle()
        self.owner = None

    def is_over(self, day: int) -> bool:
        """Return True if the function was deleted before `day`, and all its usage is stored.

        As long as this returns False, a new function of the same name continues this account, with the used part of the
        budget.
        """
        return not self._spenders and self._ended_on < day and not self.unwritten

    # -- what is used

    def settle(self) -> None:
        """Add the usage since the last call to the sums. This usage counts for the day of the last call."""
        now_s, used = time.monotonic(), self._past
        for spender in self._spenders:
            used += spender.usage(now_s)
        news, self._settled = used - self._settled, used
        if not self.footprint.worker_gb:
            self._unmeasured += news
        self._add(priced(news, self.footprint, self._prices) + self._counted())
        if (day := day_of(time.time())) < self.day - 1:
            # The clock was days ahead, and was set back. Use the present day, so that the next midnight renews the budget.
            self.day = day
        # If the clock was set back over one midnight, keep the later day. Then the budget is renewed neither now nor when
        # the clock reaches this midnight again.
        elif day > self.day:
            self.day, self.today, self.forgiven, self._unmeasured = day, Usage(), Spending(), Usage()
            self._elsewhere = self._reserved = Spending()
            # Check the budget soon, because yesterday's exhausted budget refuses calls until `check`. The timer for the end of
            # the day may be late, because the wall clock can be set.
            asyncio.get_running_loop().call_soon(self.check)

    def note_tokens(self, *, prompt: int, cached: int = 0, generated: int = 0) -> None:
        """Add the tokens of a call of a language model. `cached` is the part of `prompt` that the model did not need to read."""
        self._add(Usage(prompt_tokens=prompt, cached_tokens=cached, generated_tokens=generated))

    def _add(self, used: Usage) -> None:
        self.total, self.today = self.total + used, self.today + used
        self.unwritten.add(self.owner, used)

    def measured(self, footprint: Footprint) -> None:
        """Use `footprint`, which was measured now, for the usage from now on.

        The worker time of today that came before the first measurement of a worker gets a new price, from the measured
        figures.
        """
        self.settle()
        before, self.footprint = self.footprint, footprint
        if footprint.worker_gb:
            owed, self._unmeasured = self._unmeasured, Usage()
            self._add(priced(owed, footprint, self._prices) - priced(owed, before, self._prices))
        self.check()

    def to_write(self) -> dict[str, Usage]:
        """Return the usage that is not yet stored, by owner. While there are revisions, the present owner has an entry even without usage."""
        present = {self.owner: Usage()} if self._spenders and self.owner is not None else {}
        return present | self.unwritten.by_owner()

    # -- the budget

    @property
    def exhausted(self) -> bool:
        return self.state is BudgetState.EXHAUSTED

    @property
    def scarce(self) -> bool:
        """True if at least the share `WARN_AT` of the budget is used."""
        return self.state is not BudgetState.WITHIN

    @property
    def limited(self) -> bool:
        return self._budget.money_per_day is not None or self._budget.seconds_per_day is not None

    @property
    def budget(self) -> BudgetSpec:
        return self._budget

    @property
    def spent(self) -> Spending:
        """The usage of all gateways that counts against today's budget."""
        money, seconds = self._used()
        return Spending(money - self.forgiven.money, seconds - self.forgiven.seconds)

    def _used(self) -> Spending:
        elsewhere = self._elsewhere
        return Spending(self.today.cost + elsewhere.money, self.today.worker_s + elsewhere.seconds)

    def open(self, budget: BudgetSpec, owner: str) -> None:
        """Set the budget and the owner of the revision that has become live.

        Usage until now counts for the previous owner. The usage of a function's first deploy counts for the new owner.
        """
        self.settle()
        before, self.owner = self.owner, owner
        if before is None:
            self.unwritten.add(owner, self.unwritten.take_unowned())
        self._budget = budget
        self.check()

    def forgive(self) -> None:
        """If the budget is used up, let the function use all of it once more today."""
        if not self.exhausted:
            return
        self.settle()
        self.forgiven = self._used()
        self.check()

    def note_elsewhere(self, used: Spending, forgiven: Spending) -> None:
        """Learn what the other gateways have used of today's budget, and what a reset at one of them has forgiven."""
        forgiven = Spending(*map(max, forgiven, self.forgiven))
        if (used, forgiven, Spending()) != (self._elsewhere, self.forgiven, self._reserved):
            self._elsewhere, self.forgiven, self._reserved = used, forgiven, Spending()
            self.check()

    def reserve(self, share: float) -> None:
        """Leave this share of the rest of today's budget to the other gateways, until `note_elsewhere` is called."""
        self.settle()
        spent, most = self.spent, (self._budget.money_per_day or 0.0, self._budget.seconds_per_day or 0.0)
        self._reserved = Spending(*(share * max(0.0, limit - used) for limit, used in zip(most, spent, strict=True)))  # fmt: skip
        self.check()

    @property
    def works(self) -> bool:
        """True if the function has workers."""
        return any(one.worker_total for one in self._spenders)

    def check(self) -> None:
        """Decide whether the function may use more, and when to decide again. Tell the function's revisions."""
        before, self.due_s = self.state, math.inf
        if not self.limited:
            self.state, self.share = BudgetState.WITHIN, 0.0
        else:
            self.settle()
            left_s = day_left_s(self.day, time.time())
            counted = Spending(*map(operator.add, self.spent, self._reserved))
            self.state, self.share, again_in_s = decide_budget(self._budget, counted, self._rate(), left_s)
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
        """Return the error of an invocation for which no worker may be started today. The error shows no amounts."""
        # In the first moment of a new day, `self.day` may still be yesterday. Then `day_left_s` is negative.
        retry_s = max(LEAST_WAIT_S, day_left_s(self.day, time.time()))
        if any(self._reserved):
            message = f"{self._function} has used this gateway's part of its budget, and the database of the gateways cannot be reached."
            return BudgetExhausted(message, remedy="Try again.", details={"retry_after_s": 5.0})
        return BudgetExhausted(
            f"{self._function} has used its budget for today. The next day begins at 0:00 UTC.",
            remedy=f"Raise [budget] in pilotflame.toml and deploy, or: pilotflame reset {self._function}",
            details={"retry_after_s": round(retry_s, 3)},
        )

    def _rate(self) -> Spending:
        """Return the money and the worker-seconds that the function uses in a second, if no more workers start."""
        workers, footprint, prices = (
            sum(one.worker_total for one in self._spenders),
            self.footprint,
            self._prices,
        )
        rest_gb = footprint.beside_gb if workers else footprint.rest_gb
        per_h = (workers * footprint.worker_gb + rest_gb) * prices.memory_gb_hour
        per_h += footprint.disk_gb * prices.disk_gb_hour + workers * footprint.devices * prices.device_hour
        return Spending(per_h / HOUR_S, float(workers))

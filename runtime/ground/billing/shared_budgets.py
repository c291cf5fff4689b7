"""Lets the budgets of functions hold over all gateways that share a database.

Each gateway tells the others what it has used of a budget today. While it cannot, it uses at most an equal part of what was left.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..storing.members import DaySpending
from .account import Account
from .budget import Spending
from .ledger import Ledger

LEAST_SHARE = 0.001
"""The others are told of use of at least this share of a budget; of any use, if the budget is nearly used up."""


class SharedBudgets:
    """The budgets of the functions of one gateway."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[str, DaySpending] = {}

    def report(self) -> dict[str, DaySpending]:
        """Return the figures of this gateway that the others should know, by function."""
        return {name: now for name, account in self._ledger.limited() if (now := self._news(name, account))}

    def take(self, told: Mapping[str, DaySpending], elsewhere: Mapping[str, DaySpending]) -> None:
        """Follow a heartbeat, which has told the figures `told` to the others. `elsewhere` has what the others have used."""
        self._told.update(told)
        for function, account in self._ledger.limited():
            found = elsewhere.get(function)
            _, *figures = found if found and found.day == account.day else DaySpending(account.day)
            account.note_elsewhere(Spending(*figures[:2]), Spending(*figures[2:]))

    def cut_off(self, gateways: int) -> None:
        """Leave to the other gateways, which cannot be heard, their parts of what is left of each budget."""
        for _, account in self._ledger.limited():
            account.reserve(1.0 - 1.0 / gateways)

    def _news(self, function: str, account: Account) -> DaySpending | None:
        if account.works:
            account.settle()
        now = DaySpending(account.day, account.today.cost, account.today.worker_s, *account.forgiven)
        told = self._told.get(function)
        if told is None or told.day != now.day:
            told = DaySpending(now.day)
        least = 0.0 if account.scarce else LEAST_SHARE
        moved = any(
            limit and abs(new - old) > least * limit
            for limit, new, old in zip(account.limits, now[1:], told[1:], strict=False)
        )
        return now if moved or now[3:] != told[3:] else None

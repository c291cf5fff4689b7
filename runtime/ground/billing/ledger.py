"""Keeps the accounts of all functions, and writes their usage to disk, once a minute and when the gateway ends."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from ....errors import GatewayError
from ..storing.members import DaySpending
from ..telemetry.metrics import Reading, Totals
from .account import Account, Spender, StoredUsage
from .budget import BudgetSpec, Spending, day_of
from .usage import HOUR_S, Prices, Usage
from .usage_store import Standing, UsageQuery, UsageRecord, UsageStore

LOG = logging.getLogger(__name__)
WRITE_EVERY_S = 60.0
# The owner of usage that belongs to no function. No API key has such an id.
NODE = "(node)"


class Ledger:
    """The accounts of the functions of one gateway. A deleted function keeps its account until the next day, and until its usage is stored."""

    def __init__(
        self, store: UsageStore, prices: Prices, totals: Callable[[str], Totals], currency: str = "USD", *, fresh: bool = False
    ) -> None:  # fmt: skip
        """`totals` returns the counts of a function from the metrics. The ledger uses the counts of cold starts.

        If `fresh`, the budgets of today begin unused: `SharedBudgets` knows what earlier runs of the gateway have used.
        """
        self.prices, self.currency, self._fresh = prices, currency, fresh
        self._store, self._totals = store, totals
        self._accounts: dict[str, Account] = {}
        self._node: set[str] = set()
        self._known_colds: dict[str, Usage] = {}
        self._stored: dict[str, tuple[Usage, Standing]] = {}
        self._stored_day = 0
        self._begun_at = time.time()
        self._writing = asyncio.Lock()

    def open(self) -> None:
        """Read the stored usage of today. Blocks. Raise GatewayError if the store cannot be used."""
        self._store.open()
        now = time.time()
        self._stored, self._stored_day = self._store.today(now), day_of(now)

    def account(self, function: str) -> Account:
        """Return the account of a function. A new account begins with the stored usage of today."""
        if function not in self._accounts:
            used, standing = self._stored.pop(function, (Usage(), Standing()))
            day = day_of(time.time())
            # The stored usage may belong to an earlier day.
            today = used if self._stored_day == day else Usage()
            forgiven = Spending(standing.money, standing.seconds) if standing.day == day else Spending()
            if self._fresh:
                today, forgiven = Usage(), Spending()
            stored = StoredUsage(today, forgiven, standing.footprint)
            counted = functools.partial(self._new_colds, function)
            self._accounts[function] = Account(function, self.prices, stored, counted)
        return self._accounts[function]

    def limited(self) -> list[tuple[str, Account]]:
        """Return the accounts with a budget, and their functions."""
        return [one for one in self._accounts.items() if one[1].limited]

    def open_node(self, name: str, processes: Spender) -> None:
        """Open the account `name` of processes of the node that belong to no function. This account has no budget."""
        account = self.account(name)
        self._node.add(name)
        account.attach(processes)
        account.open(BudgetSpec(), NODE)

    async def knows(self, function: str) -> bool:
        """Return True if the function is deployed, or if usage of it is known. Raise GatewayError if the store cannot be used."""
        if (account := self._accounts.get(function)) is not None and account.to_write():
            return True
        return await asyncio.to_thread(self._store.knows, function)

    def note_removed(self, function: str) -> None:
        """Record that a function was deleted. The caller drops the function's metrics next."""
        self.account(function).note_removed()
        self._known_colds.pop(function, None)

    async def run(self) -> None:
        """Write once a minute, and at the end of each hour. Once a day, remove usage that is too old."""
        pruned_day = 0
        while True:
            await asyncio.sleep(min(WRITE_EVERY_S, HOUR_S - time.time() % HOUR_S))
            try:
                await self.write()
                if (today := day_of(now := time.time())) != pruned_day:
                    await asyncio.to_thread(self._store.forget_old, now)
                    pruned_day = today
            except GatewayError as error:
                # The next minute's write includes the usage that could not be written.
                LOG.warning("%s", error)

    async def close(self) -> None:
        """Write the usage that is not written yet. The functions must be closed."""
        try:
            await self.write()
        except GatewayError as error:
            LOG.warning("the usage of the last minute is lost: %s", error)
        await asyncio.to_thread(self._store.close)

    async def write(self) -> None:
        """Store the usage since the last call. Raise GatewayError if the store cannot be used."""
        async with self._writing:
            await self._settle()
            records, at = self._records(), self._begun_at
            self._begun_at = time.time()
            # Take the usage out of the accounts before it is stored. If this method is cancelled, the thread still
            # stores it, and no usage may be stored twice.
            for record in records:
                self._accounts[record.function].unwritten.written(record.owner, record.usage)
            loop = asyncio.get_running_loop()
            adding = loop.run_in_executor(None, self._store.add, at, records)
            # Use a callback, because a cancelled caller does not learn whether the thread could store the usage.
            adding.add_done_callback(functools.partial(self._note_added, at, records))
            await asyncio.shield(adding)
            self._forget_ended()

    def _note_added(self, at: float, records: Sequence[UsageRecord], added: asyncio.Future[None]) -> None:
        """If the usage could not be stored, put it back into the accounts, for the next `write`."""
        if not added.cancelled() and added.exception() is not None:
            self._begun_at = at
            for record in records:
                self._accounts[record.function].unwritten.add(record.owner, record.usage)

    def _forget_ended(self) -> None:
        """Forget the accounts of functions that were deleted before today, so that accounts do not accumulate."""
        today = day_of(time.time())
        for function in [name for name, account in self._accounts.items() if account.is_over(today)]:
            del self._accounts[function]
            self._known_colds.pop(function, None)

    async def read(self, query: UsageQuery) -> list[tuple[str | int, Usage]]:
        """Return the usage that a query names, as sums by its key, up to now. Raise GatewayError if the store cannot be used."""
        async with self._writing:
            found = dict(await asyncio.to_thread(self._store.read, query, time.time()))
            await self._settle()
            at = time.time()
            for record in self._records() if query.since <= at < query.until else ():
                if query.functions is None or record.function in query.functions:
                    key = query.by.of(record.function, record.owner, self._begun_at)
                    found[key] = found.get(key, Usage()) + record.usage
        return sorted(found.items(), key=lambda item: item[0])

    async def readings(self) -> list[Reading]:
        """Return the metrics of usage and budgets."""
        seconds, cost, budget, tokens = (dict[tuple[str, ...], float]() for _ in range(4))
        await self._settle()
        for function, account in list(self._accounts.items()):
            # Let requests go on: there may be a thousand accounts.
            await asyncio.sleep(0)
            used = account.total
            ready_s = used.worker_s - used.parked_s
            held = (
                ("ready", ready_s),
                ("parked", used.parked_s),
                ("zygote", used.zygote_s),
                ("local", used.local_s),
            )
            if function not in self._node:
                seconds.update({(function, rung): s for rung, s in held})
            cost[(function,)] = used.cost
            kinds = (
                ("prompt", used.prompt_tokens),
                ("cached", used.cached_tokens),
                ("generated", used.generated_tokens),
            )
            if used.prompt_tokens:
                tokens.update({(function, kind): count for kind, count in kinds})
            if account.limited:
                budget[(function,)] = account.share
        rungs = "Seconds on each rung: of workers, of parked ones, without a worker but with a zygote, and with files only."
        return [
            Reading("rung_seconds", rungs, seconds, ("function", "rung"), total=True),
            Reading("cost", "Money for memory, disk and devices, at the gateway's prices.", cost, total=True),
            Reading(
                "tokens",
                "Tokens of language models. `cached` is a part of `prompt`.",
                tokens,
                ("function", "kind"),
                total=True,
            ),
            Reading("budget_used_ratio", "Used share of today's budget.", budget),
        ]

    async def _settle(self) -> None:
        for account in list(self._accounts.values()):
            account.settle()
            # Let requests go on: there may be a thousand accounts.
            await asyncio.sleep(0)

    def _records(self) -> Sequence[UsageRecord]:
        return [
            UsageRecord(function, owner, used, _standing(account))
            for function, account in self._accounts.items()
            for owner, used in account.to_write().items()
        ]

    def _new_colds(self, function: str) -> Usage:
        """Return the cold starts of a function since the last call."""
        totals = self._totals(function)
        colds = Usage(cold_starts=totals.cold_starts, waiting_s=sum(totals.cold_phases_s.values()))
        before, self._known_colds[function] = self._known_colds.get(function, Usage()), colds
        return colds - before


def _standing(account: Account) -> Standing:
    footprint, forgiven = account.footprint, account.forgiven
    return Standing(
        account.day,
        *forgiven,
        footprint.worker_gb,
        footprint.rest_gb,
        footprint.disk_gb,
        footprint.devices,
        footprint.beside_gb,
    )


class SharedBudgets:
    """The budgets of one of several gateways. Each gateway reports its use of today to the others.

    Without reports of the others, a gateway uses at most an equal part of what is left of each budget.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._told: dict[str, DaySpending] = {}

    def report(self) -> dict[str, DaySpending]:
        """Return the figures of this gateway that have changed, by function."""
        news = {function: _spending(account) for function, account in self._ledger.limited()}
        return {name: now for name, now in news.items() if now != self._told.get(name, DaySpending(now.day))}

    def take(self, told: Mapping[str, DaySpending], elsewhere: Mapping[str, DaySpending]) -> None:
        """Apply the result of a heartbeat, which has sent the figures `told` to the others. `elsewhere` has what the others have used."""
        self._told.update(told)
        for function, account in self._ledger.limited():
            found = elsewhere.get(function)
            _, *figures = found if found and found.day == account.day else DaySpending(account.day)
            account.note_elsewhere(Spending(*figures[:2]), Spending(*figures[2:]))

    def cut_off(self, gateways: int) -> None:
        """Leave an equal part of what is left of each budget to each of the `gateways`, because the reports of the others do not arrive."""
        for _, account in self._ledger.limited():
            account.reserve(1.0 - 1.0 / gateways)


def _spending(account: Account) -> DaySpending:
    if account.works:
        account.settle()
    return DaySpending(account.day, account.today.cost, account.today.worker_s, *account.forgiven)

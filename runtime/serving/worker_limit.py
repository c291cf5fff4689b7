"""Keeps the workers of all functions together below the gateway's `max_workers`, and those of each owner below theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ..scaling.node_limit import Claim, Limits, ReachedLimit, cap, giving, granted, poorest_first

# A worker that was idle for so long may be stopped or parked if callers of another function wait for one.
GIVE_AFTER_S = 1.0
# Those who want more are asked again so often: no event reports that a worker is idle for long.
ASK_AGAIN_S = 1.0


class Claimant(Protocol):
    """A revision, as the limit sees it."""

    @property
    def owner(self) -> str:
        """Whose limit counts for its workers, beside that of the gateway."""

    def claim(self) -> Claim:
        """Return what it has. What it wants is told by `WorkerLimit.ask`."""

    def give(self, reached: ReachedLimit) -> None:
        """Stop one worker in favour of another function, because this limit is reached."""

    def scale(self) -> None:
        """Ask again, if more workers are still wanted."""


class WorkerLimit:
    """Who has workers on this node, and who wants more than there may be."""

    def __init__(
        self, most: int | None = None, of_owner: Callable[[str], int | None] = lambda _owner: None
    ) -> None:
        """`most` is the largest number of workers of all functions, `of_owner` returns that of one owner's functions;
        None for no limit."""
        self._most, self._of_owner = most, of_owner
        # For each revision, how many workers it wants and may not start, and whether callers wait for them.
        self._missing: dict[Claimant, tuple[int, bool]] = {}
        # Those that want more than they may start, and why they may not.
        self._short: dict[Claimant, ReachedLimit] = {}
        self._offering = self._moved = False
        self._timer: asyncio.TimerHandle | None = None

    def join(self, one: Claimant) -> None:
        self._missing[one] = (0, False)

    def leave(self, one: Claimant) -> None:
        self._missing.pop(one, None)
        self._short.pop(one, None)
        self.offer()

    def limits(self, one: Claimant) -> bool:
        """Return True if any limit counts for a revision."""
        return self._most is not None or self._of_owner(one.owner) is not None

    def room(self, one: Claimant, workers: int) -> int:
        """Return for how many of `workers` of a revision there is room now, without asking for them."""
        members = self._rivals(one)
        if members is None:
            return workers
        claims = [Claim(0, missing=workers, owner=one.owner), *(other.claim() for other in members)]
        return granted(claims, 0, self._limits(members))

    def reached(self, one: Claimant) -> ReachedLimit | None:
        """Return the limit because of which a revision has fewer workers than it wants; None if there is none."""
        return self._short.get(one)

    def ask(self, one: Claimant, workers: int, *, waiting: bool) -> int:
        """Return how many of `workers` a revision may start now. Others may have to stop some for the rest.

        `waiting` is True if callers wait for them.
        """
        members = self._rivals(one)
        if members is None or one not in self._missing:
            self._short.pop(one, None)
            if one in self._missing:
                self._missing[one] = (0, False)
            return workers
        self._missing[one] = (workers, waiting)
        self._short.pop(one, None)
        if not workers:
            return 0
        limits, asking = self._limits(members), members.index(one)
        start = granted(self._claims(members), asking, limits)
        self._missing[one] = (workers - start, waiting)
        self._moved = self._moved or start > 0
        if start < workers:
            self._take(one, start, members, limits)
            self._ask_again()
        return start

    def _take(self, one: Claimant, start: int, members: list[Claimant], limits: Limits) -> None:
        """Have others stop workers for those that a revision misses, which starts `start` now."""
        asking = members.index(one)
        for _ in range(self._missing[one][0]):
            claims = self._claims(members)
            claims[asking] = claims[asking]._replace(workers=claims[asking].workers + start)
            # Without one, the free places are for others that want fewer.
            self._short[one] = reached = cap(claims, asking, limits) or self._likely(one, limits)
            if (giver := giving(claims, asking, limits)) is None:
                break
            members[giver].give(reached)
            self._moved = True

    def offer(self) -> None:
        """Let those who want more workers ask again: a worker has ended, or has nothing to do."""
        if self._short and not self._offering:
            self._offering = True
            asyncio.get_running_loop().call_soon(self._offer)

    def _offer(self) -> None:
        self._offering = False
        members = list(self._missing)
        # Owners who have as many workers as they may have.
        full = set[str]()
        for number in poorest_first(self._claims(members)):
            one = members[number]
            if one.owner in full:
                continue
            self._moved = False
            one.scale()
            if (reached := self._short.get(one)) is None or self._moved:
                continue
            if reached.name == "max_workers":
                # Nor is there any for those behind it. Each question costs as much as there are functions.
                break
            full.add(one.owner)

    def _ask_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._short:
            self._offer()
            self._ask_again()

    def _likely(self, one: Claimant, limits: Limits) -> ReachedLimit:
        return (
            ReachedLimit("max_workers", self._most)
            if self._most is not None
            else ReachedLimit("owner_limit", limits.owners[one.owner])
        )

    def _rivals(self, one: Claimant) -> list[Claimant] | None:
        """Return the revisions that share a limit with this one, which is among them; None if it has no limit."""
        if self._most is not None:
            return list(self._missing)
        if self._of_owner(one.owner) is None:
            return None
        return [other for other in self._missing if other.owner == one.owner]

    def _limits(self, members: list[Claimant]) -> Limits:
        owners = {owner: self._of_owner(owner) for owner in {one.owner for one in members}}
        return Limits(self._most, {owner: most for owner, most in owners.items() if most is not None})

    def _claims(self, members: list[Claimant]) -> list[Claim]:
        claims = [(one.claim(), *self._missing[one]) for one in members]
        return [
            claim._replace(missing=missing, waiting=waiting) if missing else claim
            for claim, missing, waiting in claims
        ]

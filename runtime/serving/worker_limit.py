"""Keeps the workers of all functions together below the gateway's `max_workers`."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ..scaling.node_limit import Claim, giving, granted, poorest_first

# Those who want more are asked again so often: no event reports that a worker is idle for long.
ASK_AGAIN_S = 1.0


class Claimant(Protocol):
    """A revision, as the limit sees it."""

    def claim(self) -> Claim:
        """Return what it has. What it wants is told by `WorkerLimit.ask`."""

    def give(self) -> None:
        """Stop one worker in favour of another function."""

    def scale(self) -> None:
        """Ask again, if more workers are still wanted."""


class WorkerLimit:
    """Who has workers on this node, and who wants more than there may be."""

    def __init__(self, most: int | None = None) -> None:
        """`most` is the largest number of workers of all functions; None for no limit."""
        self.most = most
        # For each revision, how many workers it wants and may not start, and whether callers wait for them.
        self._missing: dict[Claimant, tuple[int, bool]] = {}
        # Those that want more than they may start.
        self._short: set[Claimant] = set()
        self._offering = self._moved = False
        self._timer: asyncio.TimerHandle | None = None

    def join(self, one: Claimant) -> None:
        self._missing[one] = (0, False)

    def leave(self, one: Claimant) -> None:
        self._missing.pop(one, None)
        self._short.discard(one)
        self.offer()

    def room(self, workers: int) -> int:
        """Return for how many of `workers` there is room now, without asking for them."""
        if self.most is None:
            return workers
        return max(0, min(workers, self.most - sum(one.claim().workers for one in self._missing)))

    def is_short(self, one: Claimant) -> bool:
        """Return True if a revision wants more workers than it may start."""
        return one in self._short

    def ask(self, one: Claimant, workers: int, *, waiting: bool) -> int:
        """Return how many of `workers` a revision may start now. Others may have to stop some for the rest.

        `waiting` is True if callers wait for them.
        """
        if self.most is None or one not in self._missing:
            return workers
        self._missing[one] = (workers, waiting)
        self._short.discard(one)
        if not workers:
            return 0
        claims = self._claims()
        members = list(self._missing)
        asking = members.index(one)
        start = granted(claims, asking, self.most)
        self._missing[one] = (workers - start, waiting)
        self._moved = self._moved or start > 0
        if start < workers:
            self._short.add(one)
            self._ask_again()
        for _ in range(workers - start):
            if (giver := giving(self._claims(), asking)) is None:
                break
            members[giver].give()
            self._moved = True
        return start

    def offer(self) -> None:
        """Let those who want more workers ask again: a worker has ended, or has nothing to do."""
        if self._short and not self._offering:
            self._offering = True
            asyncio.get_running_loop().call_soon(self._offer)

    def _offer(self) -> None:
        self._offering = False
        members = list(self._missing)
        for number in poorest_first(self._claims()):
            self._moved = False
            members[number].scale()
            if self.is_short(members[number]) and not self._moved:
                # Nor is there any for those behind it. Each question costs as much as there are functions.
                break

    def _ask_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._short:
            self._offer()
            self._ask_again()

    def _claims(self) -> list[Claim]:
        return [
            one.claim()._replace(missing=missing, waiting=waiting) if missing else one.claim()
            for one, (missing, waiting) in self._missing.items()
        ]

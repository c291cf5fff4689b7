"""Keeps the workers of all functions together below the gateway's `max_workers`."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from ..scaling.node_limit import Claim, giving, granted


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
        self._offering = False

    def join(self, one: Claimant) -> None:
        self._missing[one] = (0, False)

    def leave(self, one: Claimant) -> None:
        self._missing.pop(one, None)
        self.offer()

    def is_short(self, one: Claimant) -> bool:
        """Return True if a revision wants more workers than it may start."""
        return self.most is not None and self._missing.get(one, (0, False))[0] > 0

    def ask(self, one: Claimant, workers: int, *, waiting: bool) -> int:
        """Return how many of `workers` a revision may start now. Others may have to stop some for the rest.

        `waiting` is True if callers wait for them.
        """
        if self.most is None or one not in self._missing:
            return workers
        self._missing[one] = (workers, waiting)
        if not workers:
            return 0
        claims = self._claims()
        members = list(self._missing)
        asking = members.index(one)
        start = granted(claims, asking, self.most)
        self._missing[one] = (workers - start, waiting)
        for _ in range(workers - start):
            if (giver := giving(self._claims(), asking)) is None:
                break
            members[giver].give()
        return start

    def offer(self) -> None:
        """Let those who want more workers ask again: a worker has ended, or has nothing to do."""
        if not self._offering and any(missing for missing, _ in self._missing.values()):
            self._offering = True
            asyncio.get_running_loop().call_soon(self._offer)

    def _offer(self) -> None:
        self._offering = False
        for one in [one for one, (missing, _) in self._missing.items() if missing]:
            one.scale()

    def _claims(self) -> list[Claim]:
        return [
            replace(one.claim(), missing=missing, waiting=waiting)
            for one, (missing, waiting) in self._missing.items()
        ]

"""Shares a node's largest number of workers among functions that want more. It does no I/O and reads no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Claim(NamedTuple):
    """What one revision has of the node's workers, and what it wants."""

    workers: int
    """Its workers, those that start or drain included."""
    draining: int = 0
    idle: int = 0
    """Its ready workers that were without work for a while, but not those of `scale.min`."""
    resting: int = 0
    """Those of them that have no work at this moment, however short."""
    missing: int = 0
    """How many more it wants."""
    waiting: bool = False
    """True if callers wait for these. They are served first, and others may lose workers to them."""

    @property
    def kept(self) -> int:
        return self.workers - self.draining


def granted(claims: Sequence[Claim], asking: int, most: int) -> int:
    """Return how many of its missing workers a revision may start, if the node may have `most` workers.

    Each free place goes to the revision with the fewest workers: one at zero has its first before another has more.
    """
    given = [0] * len(claims)
    for _ in range(most - sum(claim.workers for claim in claims)):
        wanting = [number for number, claim in enumerate(claims) if claim.missing > given[number]]
        if not wanting:
            break
        poorest = min(wanting, key=lambda number: _rank(claims[number], given[number]))
        given[poorest] += 1
    return given[asking]


def poorest_first(claims: Sequence[Claim]) -> list[int]:
    """Return which revisions want more workers, in the order in which they are served.

    If one of them gets no worker, and nobody has to stop one for it, those behind it get none either.
    """
    wanting = [number for number, claim in enumerate(claims) if claim.missing]
    return sorted(wanting, key=lambda number: _rank(claims[number], 0))


def _rank(claim: Claim, given: int) -> tuple[bool, int]:
    return not claim.waiting, claim.kept + given


def giving(claims: Sequence[Claim], asking: int) -> int | None:
    """Return which revision has to stop a worker, so that another can start one; None if none has to.

    It is one that has an idle worker. If none has, it is the one with the most workers, if it has still at least as many
    as the other after the exchange.
    """
    mine = claims[asking]
    wanted = sum(claim.missing for claim in claims if claim.waiting)
    if not mine.waiting or not mine.missing or sum(claim.draining for claim in claims) >= wanted:
        return None
    others = [number for number in range(len(claims)) if number != asking]
    if idle := [number for number in others if claims[number].idle]:
        return max(idle, key=lambda number: (claims[number].idle, claims[number].kept))
    richest = max(others, key=lambda number: claims[number].kept, default=None)
    if richest is not None and claims[richest].kept >= mine.kept + 2:
        return richest
    resting = [number for number in others if claims[number].resting and not mine.kept]
    return max(resting, key=lambda number: claims[number].kept) if resting else None

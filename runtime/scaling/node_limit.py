"""Shares the largest numbers of workers of a node, and of an owner on it, among functions that want more.

It does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple


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
    owner: str = ""
    least: int = 0
    """How many workers nobody may take from it: `scale.min`."""

    @property
    def kept(self) -> int:
        return self.workers - self.draining


class Limits(NamedTuple):
    """How many workers there may be at most."""

    node: int | None = None
    """Of all functions; None for no limit."""
    owners: Mapping[str, int] = {}
    """Of all functions of each owner that has a limit."""


class ReachedLimit(NamedTuple):
    """The limit because of which a revision has fewer workers than it wants."""

    name: Literal["max_workers", "owner_limit", "gpus"]
    """That of the gateway, that of the owner's API key, or the memory of the GPUs (placement.py)."""
    most: int


class _Room:
    """How many more workers there may be, on the node and by owner."""

    def __init__(self, claims: Sequence[Claim], limits: Limits) -> None:
        have = Counter[str]()
        for claim in claims:
            have[claim.owner] += claim.workers
        self._node = math.inf if limits.node is None else limits.node - have.total()
        self._owners = {owner: most - have[owner] for owner, most in limits.owners.items()}

    def of(self, owner: str) -> float:
        return min(self._node, self.left_to(owner))

    @property
    def left(self) -> float:
        """How many the node's limit leaves, whoever gets them."""
        return max(0.0, self._node)

    def left_to(self, owner: str) -> float:
        """Return how many the owner's limit leaves, whatever the node has."""
        return max(0.0, self._owners.get(owner, math.inf))

    def take(self, owner: str) -> None:
        self._node -= 1
        if owner in self._owners:
            self._owners[owner] -= 1


def granted(claims: Sequence[Claim], asking: int, limits: Limits) -> int:
    """Return how many of its missing workers a revision may start.

    Each free place goes to the revision with the fewest workers: one at zero has its first before another has more.
    """
    given, room = [0] * len(claims), _Room(claims, limits)
    while wanting := [
        number
        for number, claim in enumerate(claims)
        if claim.missing > given[number] and room.of(claim.owner) > 0
    ]:
        poorest = min(wanting, key=lambda number: _rank(claims[number], given[number]))
        given[poorest] += 1
        room.take(claims[poorest].owner)
    return given[asking]


def cap(claims: Sequence[Claim], asking: int, limits: Limits) -> ReachedLimit | None:
    """Return the limit that is reached for a revision; None if it may have more workers."""
    room, owner = _Room(claims, limits), claims[asking].owner
    if not room.left_to(owner):
        return ReachedLimit("owner_limit", limits.owners[owner])
    return (
        ReachedLimit("max_workers", limits.node) if limits.node is not None and room.of(owner) <= 0 else None
    )


def poorest_first(claims: Sequence[Claim]) -> list[int]:
    """Return which revisions want more workers, in the order in which they are served.

    If one of them gets no worker, and nobody has to stop one for it, those behind it get none either; only those of
    the same owner, if that has as many as they may have.
    """
    wanting = [number for number, claim in enumerate(claims) if claim.missing]
    return sorted(wanting, key=lambda number: _rank(claims[number], 0))


def _rank(claim: Claim, given: int) -> tuple[bool, int]:
    return not claim.waiting, claim.kept + given


def giving(claims: Sequence[Claim], asking: int, limits: Limits) -> int | None:
    """Return which revision has to stop a worker, so that another can start one; None if none has to.

    It is one that has an idle worker. If none has, it is the one with the most workers, if it has still at least as many
    as the other after the exchange. If the owner of the one that asks has as many workers as they may have, it is
    one of the same owner. Nobody has to while there is room for all who wait: the places are for others then.
    """
    mine = claims[asking]
    if not mine.waiting or not mine.missing:
        return None
    room = _Room(claims, limits)
    own = limits.node is None or not room.left_to(mine.owner)
    among = [number for number, claim in enumerate(claims) if not own or claim.owner == mine.owner]
    free = room.left_to(mine.owner) if own else room.left
    draining = sum(claims[number].draining for number in among)
    if free + draining >= _wanted(claims, room, mine.owner if own else None):
        return None
    others = [number for number in among if number != asking]
    if idle := [number for number in others if claims[number].idle]:
        return max(idle, key=lambda number: (claims[number].idle, claims[number].kept))
    spare = [number for number in others if claims[number].kept > claims[number].least]
    richest = max(spare, key=lambda number: claims[number].kept, default=None)
    if richest is not None and claims[richest].kept >= mine.kept + 2:
        return richest
    resting = [number for number in others if claims[number].resting and not mine.kept]
    return max(resting, key=lambda number: claims[number].kept) if resting else None


def _wanted(claims: Sequence[Claim], room: _Room, owner: str | None) -> float:
    """Return for how many workers callers wait: those of one owner, or all that owners may still have."""
    wanted = Counter[str]()
    for claim in claims:
        if claim.waiting:
            wanted[claim.owner] += claim.missing
    if owner is not None:
        return wanted[owner]
    return sum(min(count, room.left_to(one)) for one, count in wanted.items())

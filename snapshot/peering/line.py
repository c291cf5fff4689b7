"""Says from which nodes a node takes the chunks of a snapshot: from those that stand before it in line.

Nodes that fetch the same snapshot stand in a line, in the order in which they began, and the first one asks the
bucket. To get its place, a node asks all others for theirs and takes the next number, as in Lamport's bakery
algorithm: while it chooses, others can see that it does, and afterwards it asks all others again, who then wait until
they have chosen too. A node that has the whole snapshot stands before all others. Nobody waits for a chunk of a node
behind it, so no nodes wait for each other in a circle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

MAX_NUMBER = 1 << 31
"""A larger number is none. Nodes would have to join the same line for years to get there."""

_Node = TypeVar("_Node")
_TICKET = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A position in line, which nobody else has: of equal numbers, the smaller ticket is before the other."""

    number: int
    ticket: str

    @property
    def valid(self) -> bool:
        """True if this can be the position of another node, which may say anything."""
        whole = self == WHOLE
        return whole or (0 < self.number < MAX_NUMBER and _TICKET.fullmatch(self.ticket) is not None)


WHOLE = Position(0, "whole")
"""The position of every node that has the whole snapshot."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a node says of itself for one snapshot. It neither fetches nor has it if `position` is None.

    A node that is `choosing` has no position yet.
    """

    node: str
    position: Position | None = None
    choosing: bool = False


def next_number(standings: Iterable[LineAnswer]) -> int:
    """Return the number behind all positions that are taken."""
    return 1 + max((each.position.number for each in standings if each.position is not None), default=0)


def to_ask_again(standings: Mapping[_Node, LineAnswer]) -> list[_Node]:
    """Return the nodes that were choosing, or had not begun, when this one was: they may stand before it now."""
    return [node for node, standing in standings.items() if standing.position is None]


def ahead(own: Position, standings: Mapping[_Node, LineAnswer]) -> dict[_Node, Position]:
    """Return the nodes that stand before `own`, and their positions."""
    found = {node: standing.position for node, standing in standings.items()}
    return {node: position for node, position in found.items() if position is not None and position < own}


def ranked(nodes: Iterable[str], key: str, chunk: int) -> Sequence[str]:
    """Return the nodes in the order in which to ask them for a chunk of snapshot `key`.

    Every node ranks them alike (rendezvous hashing): chunks are spread evenly over the nodes, and if one goes, only
    the chunks of which it was first move to others.
    """
    return sorted(nodes, key=lambda node: xxhash.xxh3_64_intdigest(f"{key}/{chunk}/{node}".encode()))

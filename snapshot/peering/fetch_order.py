"""Decides from which nodes a node takes the chunks of a snapshot: from the nodes that are before it in line.

Nodes that fetch the same snapshot form a line, in the order in which they began. Only the first node fetches from
the bucket. To get its position, a node asks all other nodes for their positions and takes the next number, as in
Lamport's bakery algorithm. If another node asks while a node is choosing its position, the answer says so. After the
choice, the node asks the nodes without a position again: a node that is choosing answers when it has chosen, or after
half a second. A node that has the whole snapshot is before all others. A node never waits for a chunk from a node behind
it, so nodes cannot wait for each other in a circle.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import xxhash

MAX_NUMBER = 1 << 31
"""Only positions with smaller numbers are valid. Nodes would have to join one line for years to reach this number."""

_Node = TypeVar("_Node")
_TICKET = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A unique position in line. If two positions have the same number, the position with the smaller ticket is first."""

    number: int
    ticket: str

    @property
    def valid(self) -> bool:
        """True if a node can have this position. Check it, because the answer of another node may contain anything."""
        whole = self == WHOLE
        return whole or (0 < self.number < MAX_NUMBER and _TICKET.fullmatch(self.ticket) is not None)


WHOLE = Position(0, "whole")
"""The position of every node that has the whole snapshot."""


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """A node's answer about one snapshot. `position` is None in two cases.

    If `choosing` is True, the node fetches the snapshot but has not chosen a position yet. If `choosing` is False, the
    node neither has nor fetches the snapshot.
    """

    node: str
    position: Position | None = None
    choosing: bool = False


def next_number(standings: Iterable[LineAnswer]) -> int:
    """Return the number of the position behind all taken positions."""
    return 1 + max((each.position.number for each in standings if each.position is not None), default=0)


def to_ask_again(standings: Mapping[_Node, LineAnswer]) -> list[_Node]:
    """Return the nodes that had no position when this node asked. They may be before this node now."""
    return [node for node, standing in standings.items() if standing.position is None]


def ahead(own: Position, standings: Mapping[_Node, LineAnswer]) -> dict[_Node, Position]:
    """Return the nodes that are before the position `own`, and their positions."""
    found = {node: standing.position for node, standing in standings.items()}
    return {node: position for node, position in found.items() if position is not None and position < own}


def ranked(nodes: Iterable[str], key: str, chunk: int) -> Sequence[str]:
    """Return the nodes in the order in which to ask them for a chunk of snapshot `key`.

    Every node computes the same order (rendezvous hashing). Chunks are spread evenly over the nodes. If a node
    leaves, only the chunks for which it was the first choice move to other nodes.
    """
    return sorted(nodes, key=lambda node: xxhash.xxh3_64_intdigest(f"{key}/{chunk}/{node}".encode()))

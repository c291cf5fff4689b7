"""Defines what gateways that share a database know about each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class GatewayMember(NamedTuple):
    """A gateway, as of the latest heartbeat."""

    incarnation: str
    """The name of one run of a gateway. No other run has it."""
    name: str
    version: str
    generation: int
    """The newest change of functions that this gateway has applied."""
    alive: bool
    duties: Sequence[str] = ()


class DaySpending(NamedTuple):
    """The money and the worker-seconds of a function on a day of UTC, and the parts that its budget forgives."""

    day: int
    money: float = 0.0
    seconds: float = 0.0
    forgiven_money: float = 0.0
    forgiven_seconds: float = 0.0


class GatewayReport(NamedTuple):
    """What a gateway tells the others with a heartbeat."""

    uses: Mapping[str, Any] = {}
    """As JSON: how much the gateway has and wants of each limit that applies to all gateways together."""
    spent: Mapping[str, DaySpending] = {}
    """By function, the figures of this run of the gateway that have changed."""

"""Defines what a gateway knows of each of the gateways that share a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class GatewayMember(NamedTuple):
    """A gateway, as of the latest heartbeat."""

    incarnation: str
    """The name of one run of a gateway. No other run has it."""
    name: str
    version: str
    generation: int
    """The newest change of functions that it has followed."""
    alive: bool
    duties: Sequence[str] = ()

"""Defines the facts that a gateway has about each gateway that shares its database."""

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

"""Divides a limit among the gateways that share a database. It does no I/O and reads no clock.

All gateways compute the same shares from the same reports. The sum of the shares is the limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

PATIENCE_S = 10.0
"""If more gateways want a part of a limit than the limit has units, a gateway keeps its unit for this time. After that, gateways that have waited
this long without a unit come first.
"""


class GatewayUse(NamedTuple):
    """The use of a limit by one gateway, such as the number of its workers of a function."""

    have: int = 0
    busy: int = 0
    """The part of `have` that runs calls or is starting. The gateway cannot give up this part now."""
    want: int = 0
    """How much the running and waiting calls of the gateway need."""
    since_s: float = 0.0
    """The time for which the gateway has had something, or, if it has nothing, the time for which it has wanted something."""


def by_name(reports: Mapping[str, Any], kind: str, make: Callable[..., Any], figures: int) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return the reports of one kind, by the name of the limit, then by incarnation. `make` gets the first `figures` figures of a report: newer
    gateways may report more.
    """
    told = {gateway: report.get(kind, {}) for gateway, report in reports.items()}
    names = {name: None for uses in told.values() for name in uses}
    return {name: {one: make(*uses.get(name, ())[:figures]) for one, uses in told.items()} for name in names}


def share_of(gateway: str, name: str, limit: int, uses: Mapping[str, GatewayUse]) -> int:
    """Return how much of the limit `name` one gateway may have now.

    The gateway may keep what it has, up to its share. If the busy parts of other gateways exceed their shares, it gets the rest of its share
    only when they give up the excess. `uses` has the use of each gateway, by incarnation.
    """
    shares = divide(name, limit, uses)
    exceeding = sum(max(0, use.busy - shares[one]) for one, use in uses.items() if one != gateway)
    return max(min(shares[gateway], uses[gateway].have), shares[gateway] - exceeding)


def divide(name: str, limit: int, uses: Mapping[str, GatewayUse]) -> dict[str, int]:
    """Return the share of each gateway: first what its calls need, then what it has, then an equal part of the rest.

    If there is not enough for all in one of these steps, each gateway gets the same, at most what it asks for.
    """
    return dict(_divide(name, limit, tuple(uses.items())))


# Cached, because most reports do not change between two heartbeats.
@lru_cache(4096)
def _divide(name: str, limit: int, items: tuple[tuple[str, GatewayUse], ...]) -> dict[str, int]:
    uses, shares = dict(items), dict.fromkeys(dict(items), 0)
    for asks in (lambda use: use.want, lambda use: use.have, lambda _: 2 * limit):
        asked = {one: max(0, asks(use) - shares[one]) for one, use in uses.items()}
        _add_evenly(shares, limit - sum(shares.values()), asked, name, uses)
    return shares


def _add_evenly(shares: dict[str, int], left: int, asked: dict[str, int], name: str, uses: Mapping[str, GatewayUse]) -> None:  # fmt: skip
    """Add `left` to the shares: each gateway gets the same, at most what it has asked for. The remainder goes to the first in the order of `_turn`, one each."""
    level = _level(left, sorted(asked.values()))
    lacking = [one for one, count in asked.items() if count > level]
    lacking.sort(key=lambda one: _turn(name, one, uses[one], takes_turns=not level))
    remainder = left - sum(min(count, level) for count in asked.values())
    for one, count in asked.items():
        shares[one] += min(count, level) + (one in lacking[:remainder])


def _level(left: int, asked: list[int]) -> int:
    """Return the largest number that each gateway can get if gateways that ask for less get only what they ask for. `asked` is sorted."""
    for number, count in enumerate(asked):
        gateways = len(asked) - number
        if count * gateways > left:
            return left // gateways
        left -= count
    return asked[-1]


def _turn(name: str, gateway: str, use: GatewayUse, *, takes_turns: bool) -> tuple[float, ...]:
    """Return the sort key of a gateway among the gateways that do not get what they ask for."""
    # Include the limit's name, so that each limit has another order. Otherwise one gateway would get all remainders.
    rank = int.from_bytes(hashlib.blake2b(f"{name}\0{gateway}".encode(), digest_size=6).digest())
    held, patient = min(use.have, use.want), use.since_s < PATIENCE_S
    if held or not takes_turns:
        return 0 if patient or not takes_turns else 2, -held, rank
    if use.have:
        # Do not compare the ages of idle workers, because they come from reports of different times. Otherwise two gateways could each
        # prefer the other's worker, and both would end their own.
        return 3, rank
    return 3 if patient else 1, -use.since_s, rank

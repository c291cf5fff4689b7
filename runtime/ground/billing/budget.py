"""Decides whether a function may use more today. It does no I/O and reads no clock.

A day is a day of UTC. The budget is not checked at fixed intervals. Each decision computes from the present use when
the function can reach the next limit at the earliest. The next decision is due at that time.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from .usage import DAY_S

# A limit counts as reached if less than this share of the limit is left, because sums of fractions are rounded.
TOLERANCE = 1e-9
# The gateway logs a warning at this share of a limit. For warnings at another share, the metrics have the used share.
WARN_AT = 0.8
# A timer may fire a little early. Then it is set again, for at least this time.
LEAST_WAIT_S = 0.005


class BudgetState(enum.StrEnum):
    """The state of the day's budget."""

    WITHIN = "within"
    WARNED = "warned"
    """At least the share `WARN_AT` is used."""
    EXHAUSTED = "exhausted"
    """All of the budget is used: no worker is started until the end of the day."""


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """The most that a function may use in a day. A limit that is None does not apply."""

    money_per_day: float | None = None
    seconds_per_day: float | None = None


class Spending(NamedTuple):
    """Money and worker-seconds: amounts used today, or rates per second."""

    money: float = 0.0
    seconds: float = 0.0


class BudgetDecision(NamedTuple):
    """The state, the largest used share of a limit, and the seconds until the next decision; None if no decision is due
    by itself.
    """

    state: BudgetState
    share: float
    again_in_s: float | None


def decide_budget(spec: BudgetSpec, spent: Spending, rate: Spending, day_left_s: float) -> BudgetDecision:
    """Return the state of the budget. `rate` is the fastest rate at which the function can use more at present.

    `day_left_s` is the time until the end of the day. Then the whole budget is available again.
    """
    limits = [
        (limit, used, per_s)
        for limit, used, per_s in zip((spec.money_per_day, spec.seconds_per_day), spent, rate, strict=True)
        if limit is not None
    ]
    share = max((_share(used, limit) for limit, used, _ in limits), default=0.0)
    if share >= 1.0 - TOLERANCE:
        return BudgetDecision(BudgetState.EXHAUSTED, share, max(LEAST_WAIT_S, day_left_s))
    state, next_share = BudgetState.WITHIN, WARN_AT
    if share >= WARN_AT * (1.0 - TOLERANCE):
        state, next_share = BudgetState.WARNED, 1.0
    waits = [(next_share * limit - used) / per_s for limit, used, per_s in limits if per_s > 0]
    again_in_s = min([day_left_s, *waits]) if limits and (waits or share) else None
    return BudgetDecision(state, share, None if again_in_s is None else max(LEAST_WAIT_S, again_in_s))


def _share(used: float, limit: float) -> float:
    return used / limit if limit > 0 else math.inf


def day_of(now_s: float) -> int:
    """Return the number of the UTC day since 1970-01-01. `now_s` is Unix time."""
    return math.floor(now_s / DAY_S)


def day_left_s(day: int, now_s: float) -> float:
    """Return the seconds until the end of the UTC day with this number. `now_s` is Unix time."""
    return (day + 1) * DAY_S - now_s

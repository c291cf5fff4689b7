"""Decides whether a function may use more today. It does no I/O and reads no clock.

A day is one of UTC. Nothing is looked up again and again: from what is used at present follows when the next limit
can be reached at the earliest, and that is when to decide again.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import NamedTuple

from .usage import DAY_S

# A limit counts as reached if less than this share of it is left: sums of fractions are rounded.
TOLERANCE = 1e-9
# A timer may fire a little early. It is set again for no less than this.
LEAST_WAIT_S = 0.005


class BudgetState(enum.StrEnum):
    """How much of the day's budget is used."""

    WITHIN = "within"
    WARNED = "warned"
    """At least the share `warn_at`."""
    EXHAUSTED = "exhausted"
    """All of it: no worker is started until the end of the day."""


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """What the owner allows for a day. A limit that is None does not apply."""

    money_per_day: float | None = None
    seconds_per_day: float | None = None
    warn_at: float = 0.8


class Spending(NamedTuple):
    """Money and worker-seconds, used today or used in each second at present."""

    money: float = 0.0
    seconds: float = 0.0


class BudgetDecision(NamedTuple):
    """The state, the largest used share of a limit, and when to decide again, in seconds; None: only if asked."""

    state: BudgetState
    share: float
    again_in_s: float | None


def decide_budget(spec: BudgetSpec, spent: Spending, rate: Spending, day_left_s: float) -> BudgetDecision:
    """Return how much of the budget is used, if `rate` is the fastest at which more can be used at present.

    `day_left_s` is the time until the end of the day, when all of it is there again.
    """
    limits = [
        (limit, used, per_s)
        for limit, used, per_s in zip((spec.money_per_day, spec.seconds_per_day), spent, rate, strict=True)
        if limit is not None
    ]
    share = max((_share(used, limit) for limit, used, _ in limits), default=0.0)
    if share >= 1.0 - TOLERANCE:
        return BudgetDecision(BudgetState.EXHAUSTED, share, max(LEAST_WAIT_S, day_left_s))
    state, next_share = BudgetState.WITHIN, spec.warn_at
    if share >= spec.warn_at * (1.0 - TOLERANCE):
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

"""Admission: whether an invocation that arrives now will end within its deadline, and if not, when to come again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .latency_curve import LatencyCurve


@dataclass(frozen=True, slots=True)
class Load:
    """What stands before a new invocation."""

    now_s: float
    ahead: int
    """How many waiting ones are served before it."""
    queued: int
    lanes: int
    """How many groups run at the same time: workers, times what one runs at once."""
    limit: int
    """How many one group has at most."""
    free_at_s: float
    """When the next lane is free: predicted from what runs, or when the first worker will be ready."""


def finish_s(load: Load, curve: LatencyCurve) -> float:
    """When it would end, as likely as not: the rest of what runs, full groups of those ahead, and its own group.

    Whether it can be relied on is asked when its turn comes, when more is known: who is refused too early was refused
    for nothing, and the worker's groups are smaller than they could be.
    """
    start_s = max(load.now_s, load.free_at_s)
    rounds, own = divmod(load.ahead, load.limit * load.lanes)
    return start_s + rounds * curve.typical(load.limit) + curve.typical(min(load.limit, own + 1))


def drained_s(load: Load, curve: LatencyCurve, promised: int = 0) -> float:
    """When all that waits now, and `promised` more, will have been started."""
    start_s = max(load.now_s, load.free_at_s)
    rounds = math.ceil((load.queued + promised) / (load.limit * load.lanes))
    return start_s + rounds * curve.typical(load.limit)

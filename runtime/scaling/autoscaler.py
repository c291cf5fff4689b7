"""The autoscaler: decides how many workers a revision should have. Pure: no I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass

# One more worker is asked for when this share of what the workers can hold is in use, not after all of it is.
NEAR_LIMIT = 0.8
# Idle workers that the load wants are looked at again after their idle timeout, but not more often than this.
LEAST_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """What the owner wants. `concurrency` is how many invocations one worker runs at a time."""

    min: int = 0
    max: int = 4
    buffer: int = 0
    concurrency: int = 1
    idle_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Stats:
    """What is. `idle_since_s` holds, for each ready worker without work, since when (oldest first)."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    idle_since_s: tuple[float, ...] = ()
    prewarm: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Start so many, stop the so many longest idle, and ask again at `wake_at_s` (None: when something happens)."""

    start: int = 0
    stop: int = 0
    wake_at_s: float | None = None


def wanted(spec: ScaleSpec, stats: Stats) -> int:
    """How many workers the present load wants, within the owner's limits."""
    load = stats.queued + stats.in_flight
    need = math.ceil(load / spec.concurrency)
    if load > 1:  # a single caller, one request after the other, is no sign of more to come
        need = max(need, math.ceil(load / (spec.concurrency * NEAR_LIMIT)))
    if load:
        need += spec.buffer
    return min(spec.max, max(spec.min, need, stats.prewarm))


def calm(spec: ScaleSpec, stats: Stats) -> float:
    """Up to how many invocations, waiting and running, the workers that are there or on their way are enough."""
    have = stats.ready + stats.starting
    if have >= spec.max:
        return math.inf
    enough = have - spec.buffer  # who brings the first load brings the buffer
    return max(1.0, enough * spec.concurrency * NEAR_LIMIT) if enough > 0 else 0.0


def decide(spec: ScaleSpec, stats: Stats, now_s: float) -> Decision:
    """What to do at `now_s`. From 0 to 1 nothing ever delays; downwards only the idle timeout does."""
    have = stats.ready + stats.starting
    want = wanted(spec, stats)
    if want > have:
        return Decision(start=want - have)
    spare = have - want
    expired = sum(1 for since in stats.idle_since_s if since + spec.idle_timeout_s <= now_s)
    stop = min(spare, expired)
    left = stats.idle_since_s[stop:]
    wake = left[0] + spec.idle_timeout_s if left and spare > stop else None
    if wake is None and left and stats.in_flight:  # nobody says when the load that wants them has become less
        wake = now_s + max(spec.idle_timeout_s, LEAST_LOOK_S)
    return Decision(stop=stop, wake_at_s=wake)

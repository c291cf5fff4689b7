"""The autoscaler decides how many workers a revision should have. Pure: no I/O, no clock.

It scales on concurrency (invocations waiting and running for each worker), as Knative's pod autoscaler does,
and scales down only after an idle timeout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# One more worker is wanted when this share of the workers' concurrency is in use, before all of it is.
NEAR_LIMIT = 0.8
# Idle workers that the load justifies are checked again after their idle timeout, at most this often.
MIN_RECHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """The owner's limits. `concurrency` is how many invocations one worker runs at a time."""

    min: int = 0
    max: int = 4
    buffer: int = 0
    concurrency: int = 1
    idle_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Stats:
    """The present state. `idle_since_s` holds a time for each ready worker without work, oldest first."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    idle_since_s: tuple[float, ...] = ()
    prewarm: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Start and stop so many workers, the longest idle first; decide again at `wake_at_s`, if given."""

    start: int = 0
    stop: int = 0
    wake_at_s: float | None = None


def wanted(spec: ScaleSpec, stats: Stats) -> int:
    """Return how many workers the present load needs, within the owner's limits."""
    load = stats.queued + stats.in_flight
    need = math.ceil(load / spec.concurrency)
    # A load of one is a single caller that sends one request after the other: no sign of more to come.
    if load > 1:
        need = max(need, math.ceil(load / (spec.concurrency * NEAR_LIMIT)))
    if load:
        need += spec.buffer
    return min(spec.max, max(spec.min, need, stats.prewarm))


def sufficient_load(spec: ScaleSpec, stats: Stats) -> float:
    """Return the largest load, waiting and running, for which ready and starting workers suffice."""
    have = stats.ready + stats.starting
    if have >= spec.max:
        return math.inf
    # The buffer is started with the first load.
    enough = have - spec.buffer
    return max(1.0, enough * spec.concurrency * NEAR_LIMIT) if enough > 0 else 0.0


def decide(spec: ScaleSpec, stats: Stats, now_s: float) -> Decision:
    """Return what to do at `now_s`. Scaling up is never delayed, scaling down only by the idle timeout."""
    have = stats.ready + stats.starting
    want = wanted(spec, stats)
    if want > have:
        return Decision(start=want - have)
    spare = have - want
    expired = sum(1 for since in stats.idle_since_s if since + spec.idle_timeout_s <= now_s)
    stop = min(spare, expired)
    left = stats.idle_since_s[stop:]
    wake = left[0] + spec.idle_timeout_s if left and spare > stop else None
    # No event tells when the load that justifies the idle workers has become less.
    if wake is None and left and stats.in_flight:
        wake = now_s + max(spec.idle_timeout_s, MIN_RECHECK_S)
    return Decision(stop=stop, wake_at_s=wake)

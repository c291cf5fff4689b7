"""Decides how many workers a revision should have. It does no I/O and reads no clock.

The number depends on the load (the waiting and the running invocations) divided by the concurrency of one
worker, as in Knative's pod autoscaler. A worker is stopped only after its idle timeout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# The load should use at most this share of the workers' concurrency: above it one more worker is started,
# before invocations have to wait.
NEAR_LIMIT = 0.8
# Idle workers that the load needs are checked again after one idle timeout, but not sooner than after this.
MIN_RECHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """The owner's limits."""

    min: int = 0
    max: int = 4
    buffer: int = 0
    """How many workers to have above the need while there is any load."""
    concurrency: int = 1
    """How many invocations one worker runs at a time, those of all its batches included."""
    idle_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Stats:
    """The present numbers of invocations and workers."""

    queued: int
    in_flight: int
    starting: int
    ready: int
    idle_since_s: tuple[float, ...] = ()
    """One time for each ready worker without work, the earliest first."""
    prewarm: int = 0
    """How many workers are wanted now even without load."""


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers to start and to stop, the longest idle first. Decide again at `wake_at_s`, if set."""

    start: int = 0
    stop: int = 0
    wake_at_s: float | None = None


def wanted(spec: ScaleSpec, stats: Stats) -> int:
    """Return how many workers the present load and `prewarm` need, within the owner's limits."""
    load = stats.queued + stats.in_flight
    need = math.ceil(load / spec.concurrency)
    # A load of one is typically one caller who sends one request after the other: one worker is enough.
    if load > 1:
        need = max(need, math.ceil(load / (spec.concurrency * NEAR_LIMIT)))
    if load:
        need += spec.buffer
    return min(spec.max, max(spec.min, need, stats.prewarm))


def sufficient_load(spec: ScaleSpec, stats: Stats) -> float:
    """Return the largest load for which the present workers suffice; infinity if there are `max`."""
    have = stats.ready + stats.starting
    if have >= spec.max:
        return math.inf
    # Any load also needs the buffer. If only the buffer's workers are there, or fewer, no load suffices.
    enough = have - spec.buffer
    return max(1.0, enough * spec.concurrency * NEAR_LIMIT) if enough > 0 else 0.0


def decide(spec: ScaleSpec, stats: Stats, now_s: float) -> Decision:
    """Return what to do at `now_s`. Workers start without a delay, and stop after the idle timeout."""
    have = stats.ready + stats.starting
    want = wanted(spec, stats)
    if want > have:
        return Decision(start=want - have)
    spare = have - want
    expired = sum(1 for since in stats.idle_since_s if since + spec.idle_timeout_s <= now_s)
    stop = min(spare, expired)
    left = stats.idle_since_s[stop:]
    wake = left[0] + spec.idle_timeout_s if left and spare > stop else None
    # The load needs all workers, also the idle ones. No event reports that it has become less: check later.
    if wake is None and left and stats.in_flight:
        wake = now_s + max(spec.idle_timeout_s, MIN_RECHECK_S)
    return Decision(stop=stop, wake_at_s=wake)

"""Forming a batch: run what waits at once, unless waiting for more items was learned to pay.

Dispatch is work-conserving by default, as in Clipper (NSDI '17). Where callers return together, the wait that
gains the most is taken. Items that would end late are dropped early, as in Nexus (SOSP '19).
"""

from __future__ import annotations

from dataclasses import dataclass

from .arrival_pattern import STEP, ArrivalPattern
from .latency_curve import LatencyCurve

# A longer wait is considered only if it brings at least so many more items.
MIN_MORE = 0.25


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision depends on."""

    now_s: float
    queued: int
    max_batch: int
    slack_s: float
    """How long the most urgent item could still wait before it must start."""


def wait_until(situation: Situation, curve: LatencyCurve, arrivals: ArrivalPattern) -> float:
    """Return until when to wait for more items; not after `now_s` means to run what waits now.

    Waiting t for k items to join the n that wait pays if it shortens the sum of all their times:
    n (L(n) - t - L(n+k)) + k (L(n) + L(k) - t - L(n+k)) > 0. The t with the largest sum is chosen.
    """
    now_s, queued = situation.now_s, situation.queued
    ended_s, expected = arrivals.ended_s, arrivals.expected()
    if queued >= situation.max_batch or ended_s is None or not expected:
        return now_s
    step_s, elapsed_s = STEP * saving(curve), now_s - ended_s
    # A saving may be too small to be divided into steps.
    if step_s <= 0 or elapsed_s >= len(expected) * step_s:
        return now_s
    arrived = _interpolate(expected, elapsed_s / step_s)
    alone_s = curve.typical(queued)
    best_gain, best_s, least = 0.0, now_s, 2 * MIN_MORE
    for step, mean in enumerate(expected, start=1):
        wait_s = step * step_s - elapsed_s
        more = min(mean - arrived, situation.max_batch - queued)
        if wait_s <= 0 or more < least:
            continue
        least = more + MIN_MORE
        if wait_s > situation.slack_s:
            break
        merged_s = wait_s + curve.typical(queued + more)
        gain = queued * (alone_s - merged_s) + more * (alone_s + curve.typical(more) - merged_s)
        if gain > best_gain:
            best_gain, best_s = gain, now_s + wait_s
    return best_s


def saving(curve: LatencyCurve) -> float:
    """Return the seconds that one batch of two saves over two batches of one: 2 L(1) - L(2)."""
    return 2 * curve.typical(1) - curve.typical(2)


def _interpolate(expected: list[float], position: float) -> float:
    """Return the mean at a position of the grid; 0 at 0."""
    below = int(position)
    left = expected[below - 1] if below else 0.0
    right = expected[min(below, len(expected) - 1)]
    return left + (position - below) * (right - left)


def too_late(deadline_s: float, now_s: float, queued: int, max_batch: int, curve: LatencyCurve) -> bool:
    """Return True if an item that starts now, in the largest possible batch, would end after its deadline.

    This is the early drop of Nexus: refusing an item that cannot be on time leaves the others their time.
    """
    return now_s + curve.bound(min(queued, max_batch)) > deadline_s

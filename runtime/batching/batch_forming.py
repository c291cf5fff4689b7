"""The gathering: what runs next, when a worker is free. Takes what is there, unless waiting was learned to pay."""

from __future__ import annotations

from dataclasses import dataclass

from .arrival_pattern import STEP, ArrivalPattern
from .latency_curve import LatencyCurve

# Waits are compared that bring so many more than shorter ones.
GRAIN = 0.25


@dataclass(frozen=True, slots=True)
class Situation:
    """What the decision may look at. Counts, and seconds of a monotonic clock."""

    now_s: float
    queued: int
    limit: int
    """How many may run together."""
    slack_s: float
    """How long the queue's most urgent item could still wait before it would have to be started."""


def wait_until(situation: Situation, curve: LatencyCurve, returns: ArrivalPattern) -> float:
    """Until when to wait for more before taking what is there; not after `now_s`: take it now.

    Waiting t for k more to join the n that are there pays if what they all would wait less is positive:
    n (L(n) - t - L(n+k)) + k (L(n) + L(k) - t - L(n+k)); the t of the largest sum is waited.
    """
    now_s, queued = situation.now_s, situation.queued
    ended_s, expected = returns.ended_s, returns.expected()
    if queued >= situation.limit or ended_s is None or not expected:
        return now_s
    step_s, elapsed_s = STEP * saving(curve), now_s - ended_s
    if step_s <= 0 or elapsed_s >= len(expected) * step_s:  # a saving may be too small to be divided
        return now_s
    came = _at(expected, elapsed_s / step_s)
    alone_s = curve.typical(queued)
    best, best_s, least = 0.0, now_s, 2 * GRAIN
    for step, mean in enumerate(expected, start=1):
        wait_s = step * step_s - elapsed_s
        more = min(mean - came, situation.limit - queued)
        if wait_s <= 0 or more < least:
            continue
        least = more + GRAIN  # for hardly more of them no longer wait is worth a look
        if wait_s > situation.slack_s:
            break
        joint_s = wait_s + curve.typical(queued + more)
        gain = queued * (alone_s - joint_s) + more * (alone_s + curve.typical(more) - joint_s)
        if gain > best:
            best, best_s = gain, now_s + wait_s
    return best_s


def saving(curve: LatencyCurve) -> float:
    """What running two together saves beside one after the other: 2 L(1) - L(2), in seconds."""
    return 2 * curve.typical(1) - curve.typical(2)


def _at(expected: list[float], position: float) -> float:
    """The mean by that many steps of the grid: straight between them, from 0 at 0."""
    below = int(position)
    left = expected[below - 1] if below else 0.0
    right = expected[min(below, len(expected) - 1)]
    return left + (position - below) * (right - left)


def too_late(deadline_s: float, now_s: float, queued: int, limit: int, curve: LatencyCurve) -> bool:
    """Whether an item that were started now, in a group as large as the queue allows, would end after its deadline.

    The window drop: refusing the one that cannot be on time leaves the others the time they need.
    """
    return now_s + curve.bound(min(queued, limit)) > deadline_s

"""Replays of one function under many fixed plans at once, and the offline optimum, which knows all arrivals.

`runtime/node/scaling/ladder_simulator.py` replays one plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pilotflame.runtime.node.scaling.ladder import Ladder
from pilotflame.runtime.node.scaling.ladder_simulator import FELT_S

FloatArray: TypeAlias = NDArray[np.float64]
SERVICE_S = 0.2
TIMEOUTS_S = (0.0, *(10 ** (power / 8) for power in range(-8, 42)), math.inf)


@dataclass(frozen=True)
class Totals:
    """The costs of many plans, an element for each plan. The fields have the meaning of the figures of `LadderRun`."""

    held: FloatArray
    waited_s: FloatArray
    felt: FloatArray
    woken: FloatArray

    @classmethod
    def nothing(cls, plans: int) -> Totals:
        return cls(*(np.zeros(plans) for _ in range(4)))

    def bills(self, wait_per_s: float) -> FloatArray:
        return self.held + wait_per_s * self.waited_s

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.held + other.held,
            self.waited_s + other.waited_s,
            self.felt + other.felt,
            self.woken + other.woken,
        )


def timeouts(ladder: Ladder) -> FloatArray:
    """Return a plan for each pair of a rung and a timeout. The plan stays READY until the timeout, and then goes to the rung at once."""
    rungs = len(ladder.rungs)
    return np.array([
        [math.inf if rung > floor else at_s for rung in range(1, rungs)]
        for floor in range(1, rungs)
        for at_s in TIMEOUTS_S
    ])  # fmt: skip


def descend(arrivals: Sequence[float], ladder: Ladder, begins: FloatArray) -> Totals:
    """Replay one function under fixed plans without steps up.

    Each row of `begins` is a plan: for each rung below READY, the time at which it first is on that rung or on a lower one.
    """
    holds = np.array([rung.hold_per_s for rung in ladder.rungs])
    wakes = np.array([rung.wake_s for rung in ladder.rungs])
    saved, lost = holds[:-1] - holds[1:], wakes[1:] - wakes[:-1]
    totals = Totals.nothing(len(begins))
    held = totals.held
    # One worker for each plan.
    ready_s = np.full(len(begins), arrivals[0])
    busy_until_s = ready_s + SERVICE_S
    for arrival_s in arrivals[1:]:
        # 0 if the worker is still busy.
        idle_s = np.maximum(arrival_s - busy_until_s, 0.0)
        across = idle_s[:, None]
        wakes_s = (across > begins) @ lost
        np.maximum(ready_s, arrival_s + wakes_s, out=ready_s)
        waited_s = ready_s - arrival_s
        held += holds[-1] * idle_s + np.minimum(across, begins) @ saved + holds[0] * wakes_s
        np.add(totals.waited_s, waited_s, out=totals.waited_s)
        np.add(totals.felt, waited_s > FELT_S, out=totals.felt)
        np.add(totals.woken, wakes_s > 0, out=totals.woken)
        np.maximum(busy_until_s, ready_s + SERVICE_S, out=busy_until_s)
    return totals


class Arrivals:
    """The arrivals of one function, and what a wake that begins at each of them leads to."""

    def __init__(self, arrivals: Sequence[float]) -> None:
        self.at_s = np.array(arrivals)
        self._sums = np.concatenate(([0.0], self.at_s.cumsum()))
        breaks = np.flatnonzero(self.at_s[1:] > self.at_s[:-1] + SERVICE_S) + 1
        ends = np.append(breaks, len(self.at_s))
        self._next_break = ends[np.searchsorted(ends, np.arange(len(self.at_s)), "right")]

    def served(self, wake_s: float) -> tuple[FloatArray, NDArray[np.int64], FloatArray]:
        """Return for each arrival, if it begins a wake: the wait, the arrival that ends the next idle period,
        and the begin of that period.
        """
        count, ready_s = len(self.at_s), self.at_s + wake_s
        later = np.searchsorted(self.at_s, ready_s, "right")
        waited_s = (later - np.arange(count)) * ready_s - (self._sums[later] - self._sums[:count])
        padded = np.append(self.at_s, math.inf)
        joins = padded[later] <= ready_s + SERVICE_S
        following = np.where(joins, self._next_break[np.minimum(later, count - 1)], later)
        idle_from_s = np.where(joins, self.at_s[following - 1] + SERVICE_S, ready_s + SERVICE_S)
        return np.maximum(waited_s, 0.0), following, idle_from_s


def optimum(arrivals: Sequence[float], ladder: Ladder, prices: Sequence[float]) -> FloatArray:
    """Return the least cost at each price, without steps up (first row) and with steps up that end before an arrival.

    It is computed backwards over all arrivals, because waiting delays the next idle period.
    """
    known, rungs = Arrivals(arrivals), ladder.rungs
    served = [known.served(rung.wake_s) for rung in rungs]
    following = np.column_stack([one[1] for one in served])
    idle_from_s = np.column_stack([one[2] for one in served])
    idles = np.append(known.at_s, 0.0)[following] - idle_from_s
    idles[following == len(arrivals)] = 0.0
    resting = _resting(idles, ladder)
    waking = np.stack([
        price * np.column_stack([one[0] for one in served])
        + rungs[0].hold_per_s * np.array([rung.wake_s for rung in rungs])
        for price in prices
    ], axis=1)  # fmt: skip
    due = np.zeros((len(arrivals) + 1, 2, len(prices), len(rungs)))
    for number in reversed(range(len(arrivals))):
        # The axes: the rung of the last wake, without or with steps up, the price, the rung of the next wake.
        best = (resting[number][:, :, None, :] + due[following[number]]).min(axis=3)
        first = best[0]
        due[number] = waking[number] + best.transpose(1, 2, 0)
    return np.asarray(first)


def _resting(idles: FloatArray, ladder: Ladder) -> FloatArray:
    """Return the costs of idle periods. The axes: the arrival, the rung of the last wake, without or with steps up, the rung at the end."""
    holds, wakes = ([getattr(rung, name) for rung in ladder.rungs] for name in ("hold_per_s", "wake_s"))
    costs = np.empty((*idles.shape, 2, len(holds)))
    for rung in range(len(holds)):
        staying = holds[rung] * idles
        costs[:, :, 0, rung] = staying
        for lower in range(rung + 1, len(holds)):
            climb_s = wakes[lower] - wakes[rung]
            # The steps up follow each other, and each rung is paid once the rung below it is reached.
            paid = sum(holds[each] * (wakes[each + 1] - wakes[each]) for each in range(rung, lower))
            climbing = holds[lower] * (idles - climb_s) + paid
            staying = np.where(idles >= climb_s, np.minimum(staying, climbing), staying)
        costs[:, :, 1, rung] = staying
    return costs

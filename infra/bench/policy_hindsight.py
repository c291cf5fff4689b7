"""Policies that know all arrivals: the best fixed ladder of one function, and the offline optimum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pilotflame.runtime.scaling.ladder import Ladder
from policy_replays import SERVICE_S, FloatArray, begins_of, descend, timeouts

MOST_EDGES, LONGEST = 150, 32
FACTORS = (0.5, 0.75, 0.9, 1.1, 1.33, 2.0)


class Arrivals:
    """The arrivals of one function, prepared for questions about every wake."""

    def __init__(self, arrivals: Sequence[float]) -> None:
        self.at_s = np.array(arrivals)
        self._sums = np.concatenate(([0.0], self.at_s.cumsum()))
        breaks = np.flatnonzero(self.at_s[1:] > self.at_s[:-1] + SERVICE_S) + 1
        ends = np.append(breaks, len(self.at_s))
        self._next_break = ends[np.searchsorted(ends, np.arange(len(self.at_s)), "right")]

    def served(self, wake_s: float) -> tuple[FloatArray, NDArray[np.int64], FloatArray]:
        """For each arrival, if it begins a wake: the wait, the arrival that ends the next idle period, and the begin of that period."""
        count, ready_s = len(self.at_s), self.at_s + wake_s
        later = np.searchsorted(self.at_s, ready_s, "right")
        waited_s = (later - np.arange(count)) * ready_s - (self._sums[later] - self._sums[:count])
        padded = np.append(self.at_s, math.inf)
        joins = padded[later] <= ready_s + SERVICE_S
        following = np.where(joins, self._next_break[np.minimum(later, count - 1)], later)
        idle_from_s = np.where(joins, self.at_s[following - 1] + SERVICE_S, ready_s + SERVICE_S)
        return np.maximum(waited_s, 0.0), following, idle_from_s

    def always_ready(self) -> tuple[FloatArray, NDArray[np.int64]]:
        """Return the idle periods of a worker that is always READY, and the arrivals that end them."""
        ending = np.flatnonzero(self.at_s[1:] > self.at_s[:-1] + SERVICE_S) + 1
        return self.at_s[ending] - self.at_s[ending - 1] - SERVICE_S, ending


def best_descent(idles: FloatArray, penalties: FloatArray, holds: FloatArray) -> list[float]:
    """Return when to step down to each rung, for idle periods that are known, each with its penalty on each rung."""
    order = np.argsort(idles)
    ascending, sums = idles[order], np.concatenate(([0.0], idles[order].cumsum()))
    paid = np.concatenate((np.zeros((1, len(holds))), penalties[order].cumsum(axis=0)))
    places = np.unique(np.linspace(0, len(idles) - 1, MOST_EDGES).astype(np.int64))
    edges = np.unique(np.concatenate(([0.0], ascending[places], ascending[-LONGEST:])))
    at_most = np.searchsorted(ascending, edges, "right")
    lengths, longer = np.diff(edges), len(idles) - at_most[1:]
    inside = np.diff(sums[at_most]) - np.diff(at_most) * edges[:-1]
    costs = np.outer(inside + longer * lengths, holds) + np.diff(paid[at_most], axis=0)
    values, choices = np.zeros(len(holds)), np.zeros((len(lengths), len(holds)), dtype=np.int64)
    for index in reversed(range(len(lengths))):
        standing = costs[index] + values
        for rung in range(len(holds)):
            choices[index, rung] = rung + int(standing[rung:].argmin())
        values = standing[choices[index]]
    begins, rung = [math.inf] * (len(holds) - 1), 0
    for index in range(len(lengths)):
        lower = int(choices[index, rung])
        begins[rung:lower] = [float(edges[index])] * (lower - rung)
        rung = lower
    return begins


def penalties_at(arrivals: Arrivals, ending: NDArray[np.int64], ladder: Ladder) -> FloatArray:
    """Return for the arrivals numbered `ending` what each costs on each rung, with all who come during the wake."""
    columns = [
        ladder.wait_per_s * arrivals.served(rung.wake_s)[0][ending] + ladder.rungs[0].hold_per_s * rung.wake_s
        for rung in ladder.rungs
    ]
    return np.column_stack(columns)


def own_best(
    arrivals: Sequence[float], ladder: Ladder, met: tuple[FloatArray, NDArray[np.int64]],
    envelope: Sequence[float],
) -> float:  # fmt: skip
    """Return the least bill that any of many fixed ladders of switch times reaches for one function.

    The candidates are all timeouts and floors, the ski-rental schedule (`envelope`), the best ladder for the idle periods that
    were met (`met`: their lengths, and the numbers of the arrivals that ended them), and the best ladder for the idle periods
    of a worker that is always READY. The best candidate is then varied.
    """
    known, holds = Arrivals(arrivals), np.array([rung.hold_per_s for rung in ladder.rungs])
    rows = [list(envelope), *timeouts(ladder).tolist()]
    for idles, ending in (met, known.always_ready()):
        if len(idles):
            rows.append(best_descent(idles, penalties_at(known, ending, ladder), holds))
    least = math.inf
    for _ in range(2):
        bills = descend(arrivals, ladder, np.array(rows)).bills(ladder.wait_per_s)
        best = rows[int(bills.argmin())]
        least = min(least, float(bills.min()))
        rows = _varied(best)
    return least


def _varied(begins: list[float]) -> list[list[float]]:
    rows = []
    for place in range(len(begins)):
        for factor in FACTORS:
            row = [*begins[:place], begins[place] * factor, *begins[place + 1 :]]
            rows.append([max(row[: index + 1]) for index in range(len(row))])
    return [*rows, *([at_s * factor for at_s in begins] for factor in FACTORS)]


def optimum(arrivals: Sequence[float], ladder: Ladder, prices: Sequence[float]) -> FloatArray:
    """Return the least bill at each price, without steps up (first row) and with steps up that end before an arrival.

    It is found backwards over all arrivals, because waiting delays the next idle period.
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
        # The axes: the rung of the last wake, with steps up or without, the price, the rung of the next wake.
        best = (resting[number][:, :, None, :] + due[following[number]]).min(axis=3)
        first = best[0]
        due[number] = waking[number] + best.transpose(1, 2, 0)
    return np.asarray(first)


def _resting(idles: FloatArray, ladder: Ladder) -> FloatArray:
    """Return what an idle period costs that ends on a rung, by arrival, last wake, with steps up or without, and rung."""
    holds, wakes = ([getattr(rung, name) for rung in ladder.rungs] for name in ("hold_per_s", "wake_s"))
    costs = np.empty((*idles.shape, 2, len(holds)))
    for rung in range(len(holds)):
        staying = holds[rung] * idles
        costs[:, :, 0, rung] = staying
        for lower in range(rung + 1, len(holds)):
            climb_s = wakes[lower] - wakes[rung]
            # Rung by rung: an upper rung is paid once the one below it is reached.
            paid = sum(holds[each] * (wakes[each + 1] - wakes[each]) for each in range(rung, lower))
            climbing = holds[lower] * (idles - climb_s) + paid
            staying = np.where(idles >= climb_s, np.minimum(staying, climbing), staying)
        costs[:, :, 1, rung] = staying
    return costs


def envelopes(ladder: Ladder, burst_waits: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return two ski-rental schedules: for lone arrivals, and for the given waiting times during a wake-up."""
    rungs = len(ladder.rungs)
    return begins_of(ladder.costs().ski_rental, rungs), begins_of(ladder.costs(burst_waits).ski_rental, rungs)

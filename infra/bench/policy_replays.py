"""Replays one function under many fixed plans at once, as `runtime/scaling/ladder_simulator.py` does under one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pilotflame.runtime.scaling.ladder import Ladder, Plan
from pilotflame.runtime.scaling.ladder_simulator import FELT_S

FloatArray: TypeAlias = NDArray[np.float64]
SERVICE_S = 0.2
# Serverless in the Wild (Shahrad et al., USENIX ATC 2020): a histogram of 240 bins, its 5th and 99th percentiles, and a
# margin of 10 %. If the counts of the bins have a coefficient of variation below 2, the function stays READY.
HISTOGRAM_BINS, HEAD, TAIL, MARGIN, LEAST_VARIATION = 240, 0.05, 0.99, 0.1, 2.0
TIMEOUTS_S = (0.0, *(10 ** (power / 8) for power in range(-8, 42)), math.inf)
BIN_WIDTHS_S = (1.0, 10.0, 60.0, 600.0)


@dataclass(frozen=True)
class Totals:
    """The costs of many plans, one element a plan. The fields have the meaning of `LadderRun`'s figures."""

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

    def part(self, rows: slice) -> Totals:
        return Totals(self.held[rows], self.waited_s[rows], self.felt[rows], self.woken[rows])


def begins_of(plan: Plan, rungs: int) -> list[float]:
    """Return for each rung below READY when a plan without steps up first stands on it or on a lower one."""
    begins = [math.inf] * (rungs - 1)
    for offset_s, rung in reversed(plan):
        begins[:rung] = [offset_s] * rung
    return begins


def timeouts(ladder: Ladder) -> FloatArray:
    """Return READY until a timeout and then the floor rung, for each of both."""
    rungs = len(ladder.rungs)
    return np.array([
        [math.inf if rung > floor else at_s for rung in range(1, rungs)]
        for floor in range(1, rungs)
        for at_s in TIMEOUTS_S
    ])  # fmt: skip


class _Workers:
    """One worker under each plan, fed with the same arrivals."""

    def __init__(self, first_s: float, plans: int) -> None:
        self.totals = Totals.nothing(plans)
        self._ready_s = np.full(plans, first_s)
        self._busy_until_s = np.full(plans, first_s + SERVICE_S)

    def idle(self, arrival_s: float) -> FloatArray:
        """Return each worker's idle time at an arrival: 0 if it still worked."""
        return np.maximum(arrival_s - self._busy_until_s, 0.0)

    def arrive(self, arrival_s: float, wakes_s: FloatArray) -> None:
        """Serve an arrival. `wakes_s` is 0 for those that were not idle."""
        totals = self.totals
        np.maximum(self._ready_s, arrival_s + wakes_s, out=self._ready_s)
        waited_s = self._ready_s - arrival_s
        np.add(totals.waited_s, waited_s, out=totals.waited_s)
        np.add(totals.felt, waited_s > FELT_S, out=totals.felt)
        np.add(totals.woken, wakes_s > 0, out=totals.woken)
        np.maximum(self._busy_until_s, self._ready_s + SERVICE_S, out=self._busy_until_s)


def descend(arrivals: Sequence[float], ladder: Ladder, begins: FloatArray) -> Totals:
    """Replay one function under fixed plans without steps up, one a row of `begins`. See `begins_of`."""
    holds = np.array([rung.hold_per_s for rung in ladder.rungs])
    wakes = np.array([rung.wake_s for rung in ladder.rungs])
    saved, lost = holds[:-1] - holds[1:], wakes[1:] - wakes[:-1]
    workers = _Workers(arrivals[0], len(begins))
    held = workers.totals.held
    for arrival_s in arrivals[1:]:
        idle_s = workers.idle(arrival_s)
        across = idle_s[:, None]
        wakes_s = (across > begins) @ lost
        held += holds[-1] * idle_s + np.minimum(across, begins) @ saved + holds[0] * wakes_s
        workers.arrive(arrival_s, wakes_s)
    return workers.totals


@dataclass(frozen=True)
class Hybrids:
    """The hybrid histogram policy, without its time series of very long gaps: one a row, with a floor rung each."""

    ready_per_s: FloatArray
    floor_per_s: FloatArray
    wake_s: FloatArray
    width_s: FloatArray

    @classmethod
    def on(cls, ladders: Sequence[Ladder]) -> Hybrids:
        """Return one policy for each combination of ladder, floor rung and bin width."""
        rows = [
            (ladder.rungs[0].hold_per_s, floor.hold_per_s, floor.wake_s, width_s)
            for ladder in ladders
            for floor in ladder.rungs[1:]
            for width_s in BIN_WIDTHS_S
        ]
        return cls(*np.array(rows).T)

    def replay(self, arrivals: Sequence[float]) -> Totals:
        """Replay one function under each."""
        workers, counts = _Workers(arrivals[0], len(self.wake_s)), _Histograms(self)
        climb_s, leave_s = counts.plans()
        held = workers.totals.held
        for arrival_s in arrivals[1:]:
            idle_s = workers.idle(arrival_s)
            before, until = np.minimum(idle_s, np.maximum(climb_s, 0.0)), np.minimum(idle_s, leave_s)
            wakes_s = np.clip(climb_s + self.wake_s - idle_s, 0.0, self.wake_s)
            wakes_s = np.where(idle_s > leave_s, self.wake_s, wakes_s) * (idle_s > 0)
            ready = self.ready_per_s * (until - before + wakes_s)
            held += ready + self.floor_per_s * (idle_s - until + before)
            workers.arrive(arrival_s, wakes_s)
            if counts.learn(idle_s):
                climb_s, leave_s = counts.plans()
        return workers.totals


class _Histograms:
    """The idle times that each of the hybrids has seen."""

    def __init__(self, policies: Hybrids) -> None:
        self._policies = policies
        count = len(policies.width_s)
        self._counts = np.zeros((count, HISTOGRAM_BINS))
        self._known, self._outside, self._squares = np.zeros(count), np.zeros(count), np.zeros(count)

    def learn(self, idle_s: FloatArray) -> bool:
        """Count the idle times above 0, and return whether there was one."""
        ended = idle_s > 0
        bins = (idle_s / self._policies.width_s).astype(np.int64)
        inside = np.flatnonzero(ended & (bins < HISTOGRAM_BINS))
        self._outside += ended & (bins >= HISTOGRAM_BINS)
        self._known[inside] += 1
        self._squares[inside] += 2 * self._counts[inside, bins[inside]] + 1
        self._counts[inside, bins[inside]] += 1
        return bool(ended.any())

    def plans(self) -> tuple[FloatArray, FloatArray]:
        """Return when each climbs to READY, below 0 if it begins there, and when it leaves for its floor rung."""
        known, policies = np.maximum(self._known, 1.0), self._policies
        mean = known / HISTOGRAM_BINS
        variation = np.sqrt(np.maximum(0.0, self._squares / HISTOGRAM_BINS - mean * mean)) / mean
        stays = (self._known == 0) | (self._outside > self._known) | (variation < LEAST_VARIATION)
        sums = self._counts.cumsum(axis=1)
        head, tail = ((sums >= (share * known)[:, None]).argmax(axis=1) for share in (HEAD, TAIL))
        climb_s = head * policies.width_s * (1 - MARGIN) - policies.wake_s
        leave_s = (tail + 1) * policies.width_s * (1 + MARGIN)
        climb_s = np.where(stays | (climb_s <= 0), -policies.wake_s, climb_s)
        return climb_s, np.where(stays, HISTOGRAM_BINS * policies.width_s, leave_s)

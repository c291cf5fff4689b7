"""Remembers which workers a function should have ahead of need, for how long, and whether calls used them."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from ...calls.serving.replica import Replica
from ...ground.telemetry.decisions import Decisions

HOLD_S = 60.0
"""The time for which workers that are started ahead of need are kept, unless the signal gives another time."""


class WarmHold(NamedTuple):
    """A signal's request for a number of workers until a time, in monotonic seconds."""

    workers: int
    until_s: float
    cause: str


class WarmHolds:
    """The holds of one function that have not ended. There are at most as many holds as workers in the largest hold."""

    def __init__(self) -> None:
        # By ascending end. Each hold wants fewer workers than the hold before it, because a hold that ends earlier and
        # does not want more workers would have no effect.
        self._steps: list[WarmHold] = []

    def add(self, hold: WarmHold) -> None:
        """Add a hold, if it wants any workers. Drop each older hold that wants no more workers and ends no later."""
        if hold.workers < 1:
            return
        if any(step.workers >= hold.workers and step.until_s >= hold.until_s for step in self._steps):
            return
        kept = [step for step in self._steps if step.workers > hold.workers or step.until_s > hold.until_s]
        self._steps = sorted([*kept, hold], key=lambda step: step.until_s)

    def clear(self) -> None:
        """Drop all holds."""
        self._steps.clear()

    def at(self, now_s: float) -> WarmHold | None:
        """Drop the holds that have ended. Return the hold that wants the most workers; None if no hold is left."""
        while self._steps and self._steps[0].until_s <= now_s:
            del self._steps[0]
        return self._steps[0] if self._steps else None


class Prewarms:
    """The holds of one function, and its workers that were started ahead of need and have served no call yet.

    `decisions` gets an entry for each such worker once it is known whether it was used.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.holds = WarmHolds()
        self.counts = Counter[tuple[str, bool]]()
        """The number of workers started ahead of need, by the kind of signal and by whether a call used them."""
        self._decisions = decisions
        self._unused: list[Replica] = []

    def watch(self, replica: Replica) -> None:
        """Learn that a worker is ready. If a signal asked for it, watch whether a call uses it."""
        if replica.activation.signal:
            self._unused.append(replica)

    def settle(self) -> None:
        """Record the workers that have been used since the last call."""
        if self._unused and (used := [one for one in self._unused if one.completed or one.outstanding.calls]):
            for replica in used:
                self.end(replica, used=True)

    def end(self, replica: Replica, *, used: bool) -> None:
        """Record whether a worker was used. Ignore a worker that was recorded before, or that no signal has started."""
        if replica in self._unused:
            self._unused.remove(replica)
            cause = replica.activation.signal
            self.counts[signal_of(cause), used] += 1
            ready_s = time.monotonic() - replica.activation.ready_s
            self._decisions.note("prewarm", cause, used=float(used), ready_s=ready_s)


def signal_of(cause: str) -> str:
    """Return the kind of a cause: its first word. Each kind is a time series in the metrics, so kinds must be few."""
    return cause.partition(" ")[0]

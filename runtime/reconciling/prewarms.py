"""Remembers which workers a function should have ahead of need, for how long, and whether calls used them."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from ..serving.replica import Replica
from ..telemetry.decisions import Decisions

HOLD_S = 60.0
"""The time for which workers that are started ahead of need are kept, if the signal does not give one."""


class WarmHold(NamedTuple):
    """A number of workers that a signal wants until a time, in monotonic seconds."""

    workers: int
    until_s: float
    cause: str


class WarmHolds:
    """The holds of one function that have not ended. Their number is at most that of workers."""

    def __init__(self) -> None:
        # By ascending end. Each hold wants fewer workers than the hold before it: a hold that ends earlier and does not want
        # more workers would have no effect.
        self._steps: list[WarmHold] = []

    def add(self, hold: WarmHold) -> None:
        """Add a hold, if it wants any workers. Drop the holds that want no more workers and end no later."""
        if hold.workers < 1:
            return
        if any(step.workers >= hold.workers and step.until_s >= hold.until_s for step in self._steps):
            return
        kept = [step for step in self._steps if step.workers > hold.workers or step.until_s > hold.until_s]
        self._steps = sorted([*kept, hold], key=lambda step: step.until_s)

    def at(self, now_s: float) -> WarmHold | None:
        """Return the hold that wants most workers at `now_s`; None if all holds have ended. Drop holds that have ended."""
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
        """The number of such workers by signal, and by whether a call used them."""
        self._decisions = decisions
        self._unused: list[Replica] = []

    def watch(self, replica: Replica) -> None:
        """Learn that a worker is ready. It counts if a signal asked for it."""
        if replica.activation.signal:
            self._unused.append(replica)

    def settle(self) -> None:
        """Note the workers that have been used since the last call."""
        if self._unused and (used := [one for one in self._unused if one.completed or one.outstanding.calls]):
            for replica in used:
                self.end(replica, used=True)

    def end(self, replica: Replica, *, used: bool) -> None:
        """Note whether a worker was used. Ignore a worker that was noted before, or that no signal asked for."""
        if replica in self._unused:
            self._unused.remove(replica)
            cause = replica.activation.signal
            self.counts[signal_of(cause), used] += 1
            ready_s = time.monotonic() - replica.activation.ready_s
            self._decisions.note("prewarm", cause, used=float(used), ready_s=ready_s)


def signal_of(cause: str) -> str:
    """Return the kind of a cause, which is its first word. There are few kinds: each is a time series."""
    return cause.partition(" ")[0]

"""Remembers which workers signals ask for ahead of need. It does no I/O and reads no clock."""

from __future__ import annotations

from typing import NamedTuple


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

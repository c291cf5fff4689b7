"""Remembers which workers signals ask for ahead of need. It does no I/O and reads no clock."""

from __future__ import annotations

from typing import NamedTuple


class WarmRequest(NamedTuple):
    """A signal's request for a number of workers until a time, in monotonic seconds."""

    workers: int
    until_s: float
    cause: str


class WarmRequests:
    """The requests of one function that have not ended. Their number is at most the largest number of workers requested."""

    def __init__(self) -> None:
        # By ascending end. Each request wants fewer workers than the request before it, because a request that ends
        # earlier and does not want more workers would have no effect.
        self._steps: list[WarmRequest] = []

    def add(self, added: WarmRequest) -> None:
        """Add a request, if it wants any workers. Drop each older request that wants no more workers and ends no later."""
        if added.workers < 1:
            return
        if any(step.workers >= added.workers and step.until_s >= added.until_s for step in self._steps):
            return
        kept = [step for step in self._steps if step.workers > added.workers or step.until_s > added.until_s]
        self._steps = sorted([*kept, added], key=lambda step: step.until_s)

    def clear(self) -> None:
        """Drop all requests."""
        self._steps.clear()

    def at(self, now_s: float) -> WarmRequest | None:
        """Drop the requests that have ended. Return the request for the most workers; None if no request is left."""
        while self._steps and self._steps[0].until_s <= now_s:
            del self._steps[0]
        return self._steps[0] if self._steps else None

"""Remembers which workers a function should have ahead of need, for how long, and whether calls used them."""

from __future__ import annotations

import time
from collections import Counter

from ...calls.serving.replica import Replica
from ...ground.telemetry.decisions import Decisions
from ..scaling.warm_requests import WarmRequests

WARM_S = 60.0
"""The time for which workers that are started ahead of need are kept, unless the signal gives another time."""


class Prewarms:
    """The requests for workers of one function, and its workers that were started ahead of need and have served no call yet.

    `decisions` gets an entry for each such worker once it is known whether it was used.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.requests = WarmRequests()
        self.counts = Counter[tuple[str, bool]]()
        """The number of workers started ahead of need, by the kind of signal and by whether a call used them."""
        self._decisions = decisions
        self._unused: list[Replica] = []

    def watch(self, replica: Replica) -> None:
        """Learn that a worker is ready. If a signal asked for it, watch whether a call uses it."""
        if replica.activation.signal:
            self._unused.append(replica)

    def settle(self) -> None:
        """Record the workers that calls have used since `settle` last ran."""
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

"""Passes on what a revision reports about its invocations: the reconciler looks when its row may have changed."""

from __future__ import annotations

from typing import Protocol

from ....errors import PilotflameError
from ...calls.serving.replica import Replica
from ...calls.serving.revision import CallWatcher
from ..scaling.revision_state import Phase
from .observed import Observed
from .reconciler import Member
from .revision_parts import RevisionParts


class Called(RevisionParts, Member, Protocol):
    """One revision, as the reports of its invocations see it."""

    observed: Observed

    def warm(self, workers: int, cause: str) -> None: ...


class CallReports(CallWatcher):
    """Passes on the reports of one revision."""

    def __init__(self, one: Called) -> None:
        self._one = one

    def look(self, arriving: int = 0) -> None:
        self._one.node.reconciler.look(self._one, arriving)

    def on_refused(self) -> None:
        # The caller was refused. Start a worker nevertheless, for the caller's retry.
        self._one.warm(1, "refused")

    def on_room(self, replica: Replica, *, waiting: bool) -> None:
        idle = not replica.outstanding.calls
        if idle:
            self._one.node.reconciler.note_change()
        if waiting or self._one.phase is Phase.RETIRING:
            self.look()
        elif idle:
            # The end of the last call changes nothing yet, but from now on time counts.
            at_s = replica.idle_since_s + self._one.observed.quiet_s
            self._one.node.reconciler.look_by(self._one.key, at_s)

    def on_followed(self, arrived_s: float) -> None:
        self._one.function.ladder.note_arrival(arrived_s)

    def explain(self, error: PilotflameError) -> PilotflameError:
        return self._one.pool.weights.explain(error)

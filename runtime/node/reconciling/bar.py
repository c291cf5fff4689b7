"""Refuses the calls of a revision that may have no worker: its function is stopped, or its starts fail."""

from __future__ import annotations

import time

from ....errors import CrashLoop
from ...calls.serving.dispatcher import Refusal
from ...ground.billing.usage import Usage
from ..scaling.revision_state import Phase
from .revision_parts import RevisionParts


class Bar:
    """Refuses the calls of one revision while it may have no worker. The function's account reads the revision's usage
    from this object.
    """

    def __init__(self, one: RevisionParts) -> None:
        self._one = one
        self._barred = ""

    def update(self) -> None:
        """While the function may not run or its starts fail, refuse the invocations for which no worker is free."""
        refusal: Refusal | None = None
        if barred := (stopped := self._one.function.stopped):
            refusal = self._one.function.refusal
        elif self._one.starts.breaker.failures:
            barred, refusal = "breaker", self.crash_loop
        if barred == self._barred:
            return
        self._barred = barred
        self._one.revision.dispatcher.bar(refusal, queued=bool(stopped))
        if stopped and (error := self._one.function.refusal()) is not None:
            self._one.starts.refuse(error)

    def crash_loop(self) -> CrashLoop | None:
        """Return the error of invocations while the breaker is open; None if a worker is ready or may be started.

        The breaker opens after many failed starts. Then no start is tried for an invocation.
        """
        now_s, breaker = time.monotonic(), self._one.starts.breaker
        if self._one.replicas.ready or not breaker.open(now_s):
            return None
        return breaker.refusal(self._one.spec.function, now_s)

    # -- the budget

    @property
    def worker_total(self) -> int:
        """The number of the revision's workers, including workers that are being forked."""
        return self._one.replicas.total

    def usage(self, now_s: float) -> Usage:
        return self._one.pool.usage(now_s)

    def on_budget(self, *, changed: bool) -> None:
        """If the budget is used up, let workers finish what they have begun, and refuse the rest."""
        self.update()
        account = self._one.function.account
        self._one.node.reconciler.look_by(self._one.key, account.due_s)
        if changed:
            if self._one.phase is not Phase.RETIRING:
                self._tell_budget()
            self._one.look()

    def _tell_budget(self) -> None:
        account = self._one.function.account
        spent = account.spent
        figures = {"used_share": account.share, "money": spent.money, "worker_s": spent.seconds}
        self._one.function.decisions.note("budget", account.state, **figures)
        self._one.logs.write("gateway", account.describe(), "warning" if account.scarce else "info")

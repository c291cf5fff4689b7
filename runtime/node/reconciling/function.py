"""Defines a function across its revisions: whether the function may run now, and the parts that its revisions share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ....errors import FunctionBarred, FunctionPaused, FunctionStopped
from ...ground.billing.account import Account
from ...ground.telemetry.cold_starts import ColdStarts
from ...ground.telemetry.decisions import Decisions
from ...ground.telemetry.invocation_end import InvocationEnd
from ...ground.telemetry.load_history import Arrivals, LoadSeries
from ..scaling.idle_distribution import SharedPrior
from ..scaling.upstream import Delays
from .idle_ladder import IdleLadder
from .prewarms import Prewarms

UNREAD = "The gateway still compares the weights with their signed digests."
"""Bars a function after a start of the gateway, until its local weights have been read."""


@dataclass(slots=True)
class Function:
    """One function. Calls, jobs, event sources, signals and the desired state ask it whether it may run."""

    name: str
    ladder: IdleLadder
    account: Account
    decisions: Decisions = field(default_factory=Decisions)
    load: LoadSeries = field(default_factory=LoadSeries)
    arrivals: Arrivals = field(default_factory=Arrivals)
    cold_starts: ColdStarts = field(default_factory=ColdStarts)
    upstreams: dict[str, Delays] = field(default_factory=dict)
    """By the name of an upstream function: the delays of this function's calls after the upstream function's calls (`Upstreams`)."""
    worker_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The numbers in the names of workers. All revisions share them, so that names stay unique."""
    prewarms: Prewarms = field(init=False)
    barred: str = ""
    """Why a policy does not allow the function to run; "" if the policies allow it."""
    secrets: dict[str, str] | None = None
    """The secrets at its deletion, for the revisions that still drain; None before the deletion. A new function of the same
    name has its own secrets."""
    paused: bool = False
    """True if the owner has paused the function. Then it has no process, and event sources leave their messages in the queue."""

    def __post_init__(self) -> None:
        self.prewarms = Prewarms(self.decisions)

    @classmethod
    def new(cls, name: str, account: Account, shared: SharedPrior, on_change: Callable[[], None]) -> Function:
        """Return a function without any history. `on_change` is called after the ladder has learned from idle periods."""
        decisions = Decisions()
        return cls(name, IdleLadder(decisions, shared, on_change), account, decisions)

    # -- may it run?

    @property
    def stopped(self) -> str:
        """The reason why the function may have no worker now; "" if it may have workers.

        A deploy may nevertheless start a worker, to prove its revision.
        """
        if self.barred:
            return "reading" if self.barred == UNREAD else "barred"
        return "paused" if self.paused else "budget" if self.account.exhausted else ""

    def refusal(self) -> FunctionStopped | None:
        """Return the error of a call, a job or a warm-up that comes now; None if it is accepted."""
        if self.barred == UNREAD:
            return FunctionBarred(UNREAD, remedy="Try again later.")
        if self.barred:
            remedy = "Deploy it again, or roll back. If a policy refuses it, change its settings, or ask the gateway's owner."
            return FunctionBarred(self.barred, remedy=remedy)
        if self.paused:
            remedy = f"Its owner has to resume it: pilotflame resume {self.name}"
            return FunctionPaused(f"{self.name} is paused.", remedy=remedy)
        return self.account.refusal() if self.account.exhausted else None

    # -- what happened

    def note_cold(self, end: InvocationEnd) -> None:
        """Remember an invocation that had a cold start."""
        self.load.note_cold(time.monotonic(), end.timeline.cold_start_s)
        self.cold_starts.note(end)

"""Holds what the gateway remembers of one function. Its revisions share it, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..telemetry.decisions import Decisions
from .account import Account
from .prewarms import Prewarms


@dataclass(frozen=True, slots=True)
class FunctionHistory:
    """What is remembered of a function when a revision of it ends, for the next one."""

    account: Account
    decisions: Decisions = field(default_factory=Decisions)
    prewarms: Prewarms = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prewarms", Prewarms(self.decisions))

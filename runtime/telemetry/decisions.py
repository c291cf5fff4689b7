"""Keeps the latest decisions about one function: what was started, stopped or moved to another rung, and why."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

# How many decisions of a function are kept. The oldest are dropped.
MAX_DECISIONS = 1000


class DecisionRecord(NamedTuple):
    """One decision of the gateway about a function."""

    at: float
    """When it was made, in Unix seconds."""
    action: str
    """What was done: "start", "stop", "prewarm", "step_down", "step_up" or "refuse"."""
    cause: str
    """Why: the signal or the rule, as "load", "idle", "warmup" or "schedule"."""
    figures: Mapping[str, float]
    """The numbers on which it was based, by name."""


class Decisions:
    """The latest decisions about one function, the oldest first."""

    def __init__(self) -> None:
        self._kept: deque[DecisionRecord] = deque(maxlen=MAX_DECISIONS)

    def note(self, action: str, cause: str, **figures: float) -> None:
        """Keep a decision that is made now."""
        self._kept.append(DecisionRecord(time.time(), action, cause, figures))

    def since(self, at: float) -> list[DecisionRecord]:
        """Return the decisions that were made at `at`, in Unix seconds, or later."""
        return [decision for decision in self._kept if decision.at >= at]

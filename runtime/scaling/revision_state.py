"""Proposes the workers of a deploy, and caps the workers of a revision that retires, may not run, or whose starts fail.

It does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from .scale_spec import ScaleSpec
from .seen import Seen
from .table import EVERY, Cap, Proposal, Rank

DEPLOY, ROLLOVER = "deploy", "rollover"
# The proof of a deploy needs a worker also while the function may have none.
PROVEN = EVERY - {Rank.PROOF}


class Phase(StrEnum):
    """Where a revision is between its deploy and its end."""

    NEW = "new"
    """It is made, and starts no worker yet."""
    PROVING = "proving"
    """It has to show that its workers start, before it replaces the live revision."""
    PROVEN = "proven"
    """It has shown that, and is about to replace the live revision. Only workers stay that it needs then."""
    LIVE = "live"
    RETIRING = "retiring"
    """It runs the accepted invocations, and accepts no more."""


class RevisionState(NamedTuple):
    """The state of a revision, beside its load."""

    phase: Phase = Phase.LIVE
    rollover: int = 0
    """How many workers are wanted at the end of the proof: those of the revision that it replaces."""
    stopped: str = ""
    """Why the function may have no worker, as "budget"; "" if it may."""
    failures: int = 0
    """Starts that have failed since a worker was ready."""
    backoff_until_s: float = 0.0
    """Until then, only callers cause a start after failed ones."""
    open: bool = False
    """True if so many starts have failed that callers cause none either before the backoff ends."""
    unexplained: bool = False
    """True after a failed start, until the fetcher or the parent of the process has reported the cause."""


NOTHING_WRONG = RevisionState()


def proposals(state: RevisionState) -> Iterator[Proposal]:
    """Yield the workers of a deploy: one that proves the revision, and those that its predecessor has."""
    if state.phase is Phase.PROVING:
        yield Proposal(Rank.PROOF, DEPLOY, 1)
    if state.rollover and state.phase in (Phase.PROVING, Phase.PROVEN):
        yield Proposal(Rank.AHEAD, ROLLOVER, state.rollover)


def caps(spec: ScaleSpec, seen: Seen, state: RevisionState, now_s: float) -> Iterator[Cap]:
    """Yield what bounds the workers, whatever the load is."""
    yield Cap("max", EVERY, held=spec.max)
    if state.phase is Phase.PROVEN:
        yield Cap("proven", frozenset({Rank.KEEP}), held=0)
    if state.phase is Phase.RETIRING:
        # Its own queue still runs.
        yield Cap("retired", EVERY - {Rank.LOAD}, held=0)
    if state.stopped:
        yield Cap(state.stopped, PROVEN, held=0)
    if state.backoff_until_s > now_s:
        yield Cap("backoff", EVERY - {Rank.LOAD}, starts=0, until_s=state.backoff_until_s)
    if state.unexplained and not seen.ready:
        yield Cap("unexplained", EVERY, starts=0)
    if state.failures and not seen.ready:
        starts = 0 if state.open else max(0, 1 - seen.starting)
        yield Cap("breaker", EVERY, starts=starts, until_s=state.backoff_until_s if state.open else math.inf)

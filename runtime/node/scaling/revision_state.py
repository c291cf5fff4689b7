"""Proposes the workers of a deploy, and caps the workers of a revision that retires, may not run, or whose starts fail.

It does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from ...ground.settings.scale_spec import ScaleSpec
from .seen import Seen
from .table import EVERY, Cap, Proposal, Rank

DEPLOY, ROLLOVER = "deploy", "rollover"
# A function that may have no worker still gets the worker with which a deploy proves a revision.
PROVEN = EVERY - {Rank.PROOF}


class Phase(StrEnum):
    """The phases of a revision from its deploy to its end."""

    NEW = "new"
    """The revision exists, but starts no worker yet."""
    PROVING = "proving"
    """The revision has to show that its workers start, before it replaces the live revision."""
    PROVEN = "proven"
    """The revision has shown that its workers start, and is about to replace the live revision. It keeps only the
    workers that it will need after that.
    """
    LIVE = "live"
    RETIRING = "retiring"
    """The revision runs the accepted invocations, and accepts no more. Its workers do not count in the `scale.max` of the
    function, but in all limits that revisions share.
    """


class RevisionState(NamedTuple):
    """The state of a revision, apart from its load."""

    phase: Phase = Phase.LIVE
    rollover: int = 0
    """The number of workers wanted at the end of the proof: the number that the replaced revision has."""
    stopped: str = ""
    """The reason why the function may have no worker, such as "budget"; "" if it may have workers."""
    failures: int = 0
    """The number of starts that have failed since a worker was last ready."""
    backoff_until_s: float = 0.0
    """After failed starts, only waiting callers cause a start before this time."""
    open: bool = False
    """True if so many starts have failed that even waiting callers cause no start before the end of the back-off."""
    begun: bool = False
    """True if the revision retires and all its accepted invocations have begun. Then its workers drain."""
    unexplained: bool = False
    """True after a failed start, until the fetcher or the parent of the process has reported the cause."""


NOTHING_WRONG = RevisionState()


def proposals(state: RevisionState) -> Iterator[Proposal]:
    """Yield the proposals of a deploy: one worker as the proof, and the number of workers of the predecessor."""
    if state.phase is Phase.PROVING:
        yield Proposal(Rank.PROOF, DEPLOY, 1)
    if state.rollover and state.phase in (Phase.PROVING, Phase.PROVEN):
        yield Proposal(Rank.AHEAD, ROLLOVER, state.rollover)


def caps(spec: ScaleSpec, seen: Seen, state: RevisionState, now_s: float) -> Iterator[Cap]:
    """Yield the caps that do not depend on the load: of `max`, of the phase, of a stop, and of failed starts."""
    yield Cap(f"max (other gateways: {spec.elsewhere})" if spec.elsewhere else "max", EVERY, held=spec.max)
    if state.phase is Phase.PROVEN:
        yield Cap("proven", frozenset({Rank.KEEP}), held=0)
    if state.phase is Phase.RETIRING:
        # A retiring revision still runs the invocations of its own queue. After the last of these has begun, the workers
        # drain, which leaves places among the ready workers to the new revision.
        yield Cap("retired", EVERY if state.begun else EVERY - {Rank.LOAD}, held=0)
    if state.stopped:
        yield Cap(state.stopped, PROVEN, held=0)
    if state.backoff_until_s > now_s:
        yield Cap("backoff", EVERY - {Rank.LOAD}, starts=0, until_s=state.backoff_until_s)
    if state.unexplained and not seen.ready:
        yield Cap("unexplained", EVERY, starts=0)
    if state.failures and not seen.ready:
        starts = 0 if state.open else max(0, 1 - seen.starting)
        yield Cap("breaker", EVERY, starts=starts, until_s=state.backoff_until_s if state.open else math.inf)

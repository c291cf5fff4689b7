"""Caps the workers of a revision that retires, has used up its budget, or whose starts fail. It does no I/O and reads no clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from .scale_spec import ScaleSpec
from .seen import Seen
from .table import EVERY, Cap, Rank


class RevisionState(NamedTuple):
    """The state of a revision, beside its load."""

    retiring: bool = False
    exhausted: bool = False
    """True if today's budget is used up."""
    failures: int = 0
    """Starts that have failed since a worker was ready."""
    backoff_until_s: float = 0.0
    """Until then, only callers cause a start after failed ones."""
    open: bool = False
    """True if so many starts have failed that callers cause none either before the backoff ends."""
    unexplained: bool = False
    """True after a start without its weights, until the fetcher has reported the cause."""


NOTHING_WRONG = RevisionState()


def caps(spec: ScaleSpec, seen: Seen, state: RevisionState, now_s: float) -> Iterator[Cap]:
    """Yield what bounds the workers, whatever the load is."""
    yield Cap("max", EVERY, held=spec.max)
    if state.retiring:
        # Its own queue still runs.
        yield Cap("retired", EVERY - {Rank.LOAD}, held=0)
    if state.exhausted:
        yield Cap("budget", EVERY, held=0)
    if state.backoff_until_s > now_s:
        yield Cap("backoff", EVERY - {Rank.LOAD}, starts=0, until_s=state.backoff_until_s)
    if state.unexplained and not seen.ready:
        yield Cap("fetcher", EVERY, starts=0)
    if state.failures and not seen.ready:
        starts = 0 if state.open else max(0, 1 - seen.starting)
        yield Cap("breaker", EVERY, starts=starts, until_s=state.backoff_until_s if state.open else math.inf)

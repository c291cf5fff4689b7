"""Computes the row of one revision from the observations. It does no I/O and reads no clock."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ...ground.settings.scale_spec import ScaleSpec
from . import load, revision_state
from .revision_state import NOTHING_WRONG, Phase, RevisionState
from .seen import Seen
from .table import Proposal, Row, combine

NOT_LIVE = (Phase.NEW, Phase.PROVING, Phase.RETIRING)


def desired(
    spec: ScaleSpec,
    seen: Seen,
    now_s: float,
    state: RevisionState = NOTHING_WRONG,
    ahead: Proposal | None = None,
) -> Row:
    """Return how many workers a revision should have at `now_s`. `ahead` is the proposal of a prewarm signal."""
    if state.phase in NOT_LIVE:
        # Only the live revision has workers for the owner and for signals.
        spec, ahead = replace(spec, min=0) if spec.min else spec, None
    proposals = chain(revision_state.proposals(state), load.proposals(spec, seen, now_s))
    caps = chain(revision_state.caps(spec, seen, state, now_s), load.caps(spec, seen, now_s))
    return combine(proposals if ahead is None else chain(proposals, (ahead,)), caps, seen)

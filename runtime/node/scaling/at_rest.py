"""Computes what a revision holds beside its workers: the zygote, the standby, and the fetched weights.

It does no I/O and reads no clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...ground.telemetry.rung_name import RungName
from .revision_state import Phase
from .seen import Seen
from .table import Aim, AtRest


class Present(NamedTuple):
    """What a revision holds beside its workers, as observed."""

    total: int = 0
    """The number of its workers, including draining workers and workers that are being forked."""
    ending: int = 0
    """The number of removed workers whose processes still run, and may use the weights."""
    lacks_standby: bool = False
    """True if there should be a standby, a zygote can fork it, and it is not being forked."""
    standby_due_s: float = math.inf
    """When a missing standby is forked although calls run."""
    relaunch_at_s: float = math.inf
    """When to launch a zygote after a death; infinity if no launch is due."""


class RestPlan(NamedTuple):
    """What the owner and the keep-alive plan say about a revision without workers."""

    keeps_zygote: bool = True
    climbs: bool = False
    """True at the step of the plan that brings the zygote back."""
    drops_weights: bool = False


def at_rest(phase: Phase, plan: RestPlan, seen: Seen, held: int, present: Present, now_s: float) -> AtRest:
    """Return what a revision should hold beside its workers. `held` is the number of workers that it should have."""
    used = held > 0 or seen.unfinished > 0
    # Keep the zygote and the weights during a deploy, which is about to fork its first worker.
    needed = present.total > 0 or phase in (Phase.NEW, Phase.PROVING)
    zygote = Aim.KEEP if used or needed or plan.keeps_zygote else Aim.END
    if zygote is Aim.KEEP and (present.relaunch_at_s <= now_s or (plan.climbs and not used)):
        zygote = Aim.WANT
    weights = RungName.READY
    if not (used or needed):
        weights = RungName.LOCAL if plan.drops_weights and not present.ending else RungName.RESIDENT
    standby, again_s = _standby(phase, seen, present, now_s)
    return AtRest(zygote, standby, weights, again_s)


def _standby(phase: Phase, seen: Seen, present: Present, now_s: float) -> tuple[Aim, float]:
    """Return whether there should be a standby, and when to ask again.

    Forking a standby takes processor time from the calls that follow a cold start, so it waits for the end of the calls.
    """
    if phase is Phase.RETIRING:
        return Aim.END, math.inf
    if not present.lacks_standby or seen.starting or phase in (Phase.NEW, Phase.PROVING):
        return Aim.KEEP, math.inf
    if seen.unfinished and present.standby_due_s > now_s:
        return Aim.KEEP, present.standby_due_s
    return Aim.WANT, math.inf

"""Decides for how long an idle function stays on which rung of its ladder, from the history of its idle times.

Five experts plan each idle period. One is followed whose plans would have cost little so far. All functions
here are pure: the caller passes what was observed, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .idle_law import Prior, Strategy, cheapest, law_of
from .ladder import BurstWait, Costs, Ladder, Plan
from .route import clamped

IDLES, INTERVALS, RECENT = 1024, 128, 32
# The bills decay by this share with each idle period, so that habits that have changed are forgotten. By the lasting
# bills it is judged what an expert has saved so far.
DECAY, LASTING_DECAY = 1 / 128, 1 / 1024
# The law of all idle times is followed unless the bill of the envelope or of the recent law is lower by this factor: where
# bursts come seldom, a few periods say little of which one is better.
STEADY_MARGIN = 0.8
# An expert that prewarms is followed only if its bill is lower than the best other one by this factor.
CLIMB_MARGIN = 0.95
EXPERTS = 5
NO_PRIOR = Prior()


@dataclass(frozen=True, slots=True)
class _Experts:
    """The plans of the envelope and of two laws of idle times, and the strategies for two laws of intervals."""

    steady: tuple[Plan, Plan, Plan]
    climbing: tuple[Strategy, Strategy]

    @property
    def rungs(self) -> int:
        """How many rungs the ladder has for which they have planned."""
        return len(self.climbing[0].costs.holds)

    def plan(self, expert: int, since_s: float) -> Plan:
        """Return the plan of an expert. Only those that prewarm look at `since_s`."""
        count = len(self.steady)
        return self.steady[expert] if expert < count else self.climbing[expert - count].plan(since_s)


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of one function. The default is a function of which nothing is known."""

    idles: tuple[float, ...] = ()
    """The last idle periods in seconds, the newest last."""
    intervals: tuple[float, ...] = ()
    """The last seconds between the arrivals that ended two idle periods one after the other."""
    waits: tuple[BurstWait, ...] = ()
    """For each rung, what an arrival on it and those after it would have waited, summed over periods."""
    periods: int = 0
    bills: tuple[float, ...] = (0.0,) * EXPERTS
    lasting_bills: tuple[float, ...] = (0.0,) * EXPERTS
    experts: _Experts | None = None

    def costs(self, ladder: Ladder) -> Costs:
        """Return the costs of `ladder` with the waiting that bursts have caused so far."""
        if len(self.waits) != len(ladder.rungs):
            return ladder.costs()
        # The wake time counts as a first sample.
        pairs = zip(self.waits, ladder.rungs, strict=True)
        return ladder.costs([(past.waited_s + rung.wake_s) / (past.wakes + 1) for past, rung in pairs])

    def unplanned(self) -> History:
        """Return this history without the plans that were made for another ladder."""
        return replace(self, experts=None)


class Choice(NamedTuple):
    """A plan, and the number of the expert that made it: 0 is the envelope, 3 and 4 prewarm."""

    expert: int
    plan: Plan


def decide(history: History, ladder: Ladder, since_s: float, prior: Prior = NO_PRIOR) -> Plan:
    """Return the plan of an idle period that begins `since_s` seconds after the arrival that ended the last one."""
    return choose(history, ladder, since_s, prior).plan


def choose(history: History, ladder: Ladder, since_s: float, prior: Prior = NO_PRIOR) -> Choice:
    """Return what `decide` does, and who made the plan.

    The plan of a candidate policy that prewarms risks no more than the policy would have saved so far: few idle times say
    little of calls at other times. A plan that risks more rests on a higher rung.
    """
    experts = _experts(history, ladder, prior)
    best = _steadiest(history)
    steady = Choice(best, experts.steady[best])
    climber = min(3, 4, key=lambda expert: history.bills[expert])
    if history.bills[climber] >= CLIMB_MARGIN * history.bills[best]:
        return steady
    saved = history.lasting_bills[best] - history.lasting_bills[climber]
    plan = _affordable(experts.plan(climber, since_s), steady.plan, history.costs(ladder), saved)
    return steady if plan is None else Choice(climber, plan)


def _affordable(bold: Plan, steady: Plan, costs: Costs, saved: float) -> Plan | None:
    """Return `bold`, kept at the lowest rung with which it risks no more than `saved`; None if no rung suffices."""
    for lowest in reversed(range(max(step.rung for step in bold) + 1)):
        plan = clamped(bold, steady, lowest, costs.wakes)
        if _risk(plan, steady, costs) <= saved:
            return plan
    return None


def _steadiest(history: History) -> int:
    """Return the best of the experts that do not prewarm."""
    if not history.idles:
        return 0
    envelope, lasting, recent = history.bills[:3]
    if min(envelope, recent) >= STEADY_MARGIN * lasting:
        return 1
    return 0 if envelope <= recent else 2


def _risk(bold: Plan, steady: Plan, costs: Costs) -> float:
    """Return by how much one plan costs more than the other, if the idle period ends at the worst moment."""
    moments = [step.offset_s * (1 + 1e-9) + 1e-9 for plan in (bold, steady) for step in plan]
    return max(costs.bill(bold, moment) - costs.bill(steady, moment) for moment in moments)


def learn(
    history: History, ladder: Ladder, idle_s: float, since_s: float,
    burst_waits: Sequence[BurstWait], prior: Prior = NO_PRIOR,
) -> History:  # fmt: skip
    """Return the history with an idle period that has ended after `idle_s` seconds.

    `since_s` is what `decide` was given at its beginning. `burst_waits` has for each rung what arrivals since the last
    call, this one included, would have waited for a wake from it. An arrival that ends an idle period begins such a
    wake, whatever the rung was, unless one is under way. Later arrivals within it count when they have come.
    """
    experts = _experts(history, ladder, prior)
    costs = history.costs(ladder)
    due = [costs.bill(experts.plan(expert, since_s), idle_s) for expert in range(EXPERTS)]
    waits = history.waits if len(history.waits) == len(burst_waits) else (BurstWait(),) * len(burst_waits)
    learned = replace(
        history,
        idles=(*history.idles, idle_s)[-IDLES:],
        intervals=(*history.intervals, since_s + idle_s)[-INTERVALS:],
        waits=tuple(
            BurstWait(past.waited_s + new.waited_s, past.wakes + new.wakes)
            for past, new in zip(waits, burst_waits, strict=True)
        ),
        periods=history.periods + 1,
        bills=_added(history.bills, due, DECAY),
        lasting_bills=_added(history.lasting_bills, due, LASTING_DECAY),
    )
    if _to_consult(learned.periods):
        experts = _consult(learned, ladder, prior)
    return replace(learned, experts=experts)


def _added(bills: Sequence[float], due: Sequence[float], decay: float) -> tuple[float, ...]:
    return tuple(old * (1 - decay) + new for old, new in zip(bills, due, strict=True))


def _to_consult(periods: int) -> bool:
    """Return True if the experts are to plan anew: each period changes a long history less."""
    return periods % (1 if periods <= 32 else 4 if periods <= 128 else 16) == 0


def _experts(history: History, ladder: Ladder, prior: Prior) -> _Experts:
    """Return the experts of a history. A deploy may have changed how many rungs there are: then they plan anew."""
    known = history.experts
    return (
        known if known is not None and known.rungs == len(ladder.rungs) else _consult(history, ladder, prior)
    )


def _consult(history: History, ladder: Ladder, prior: Prior) -> _Experts:
    costs, habits = history.costs(ladder), prior.cdf()

    def strategy(samples: Sequence[float], *, climbs: bool) -> Strategy:
        return cheapest(law_of(samples, costs, habits, climbs=climbs), costs, climbs=climbs)

    idles, intervals = history.idles, history.intervals
    lasting, climbing = strategy(idles, climbs=False).plan(), strategy(intervals, climbs=True)
    if len(idles) <= RECENT:
        return _Experts((costs.envelope, lasting, lasting), (climbing, climbing))
    recent = strategy(idles[-RECENT:], climbs=False).plan()
    return _Experts((costs.envelope, lasting, recent), (climbing, strategy(intervals[-RECENT:], climbs=True)))

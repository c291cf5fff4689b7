"""Plans which rung of its ladder an idle function holds, and for how long, from the history of its idle times.

Five candidate policies plan each idle period. The function follows a policy with a low total cost so far. The method
is known as "prediction with expert advice". All functions here are pure: the caller passes the observations, and no clock is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from .idle_distribution import Prior, Strategy, cheapest, distribution_of
from .ladder import BurstWait, Costs, IdlePlan, Ladder
from .route import clamped

IDLES, INTERVALS, RECENT = 1024, 128, 32
# The accumulated cost of each policy (its bill) decays by this share with each idle period, because calling patterns change.
# The lasting bills decay more slowly. They show how much money a policy has saved so far.
DECAY, LASTING_DECAY = 1 / 128, 1 / 1024
# The policy for the distribution of all idle times is followed, unless the ski-rental schedule or the policy for the recent
# idle times has a bill that is lower by this factor. If bursts are rare, a few periods do not show which policy is better.
STEADY_MARGIN = 0.8
# A policy that prewarms is followed only if its bill is lower by this factor than the bill of the best other policy.
CLIMB_MARGIN = 0.95
CANDIDATES = 5
NO_PRIOR = Prior()


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The five candidate policies: three fixed plans, and two strategies that prewarm, whose plans depend on `since_s`.

    `steady` has the ski-rental schedule, and the plans for the distributions of all and of the recent idle times. `climbing` has
    the strategies for the distributions of all and of the recent intervals.
    """

    steady: tuple[IdlePlan, IdlePlan, IdlePlan]
    climbing: tuple[Strategy, Strategy]

    @property
    def rungs(self) -> int:
        """The number of rungs of the ladder for which the plans were made."""
        return len(self.climbing[0].costs.holds)

    def plan(self, expert: int, since_s: float) -> IdlePlan:
        """Return the plan of a policy. Only the policies that prewarm use `since_s`."""
        count = len(self.steady)
        return self.steady[expert] if expert < count else self.climbing[expert - count].plan(since_s)


@dataclass(frozen=True, slots=True)
class History:
    """The idle times of one function, and the cost of each policy so far. The default is for a new function."""

    idles: tuple[float, ...] = ()
    """The last idle periods in seconds, the newest last."""
    intervals: tuple[float, ...] = ()
    """The last intervals, in seconds, between the arrivals that ended two successive idle periods."""
    waits: tuple[BurstWait, ...] = ()
    """For each rung, how long an arrival on it and the arrivals after it would have waited, summed over periods."""
    periods: int = 0
    bills: tuple[float, ...] = (0.0,) * CANDIDATES
    lasting_bills: tuple[float, ...] = (0.0,) * CANDIDATES
    experts: _Candidates | None = None

    def costs(self, ladder: Ladder) -> Costs:
        """Return the costs of `ladder`, with the mean waiting of past bursts."""
        if len(self.waits) != len(ladder.rungs):
            return ladder.costs()
        # The wake time counts as a first sample.
        pairs = zip(self.waits, ladder.rungs, strict=True)
        return ladder.costs([(past.waited_s + rung.wake_s) / (past.wakes + 1) for past, rung in pairs])

    def unplanned(self) -> History:
        """Return this history without the plans that were made for another ladder."""
        return replace(self, experts=None)


class Choice(NamedTuple):
    """A plan, and the number of the policy that made it: 0 is the ski-rental schedule, 3 and 4 prewarm."""

    expert: int
    plan: IdlePlan


def choose(history: History, ladder: Ladder, since_s: float, prior: Prior = NO_PRIOR) -> Choice:
    """Return the plan of an idle period that begins `since_s` seconds after the arrival that ended the last period.

    The plan of a candidate policy that prewarms risks no more than the policy would have saved so far, because few idle times
    predict little about calls at other times. A plan that risks more is changed to rest on a higher rung.
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


def _affordable(bold: IdlePlan, steady: IdlePlan, costs: Costs, saved: float) -> IdlePlan | None:
    """Return `bold`, changed to go below one rung only where `steady` does; None if the risk exceeds `saved` for each
    rung.

    That rung is the lowest rung for which the risk of the changed plan is at most `saved`.
    """
    for lowest in reversed(range(max(step.rung for step in bold) + 1)):
        plan = clamped(bold, steady, lowest, costs.wakes)
        if _risk(plan, steady, costs) <= saved:
            return plan
    return None


def _steadiest(history: History) -> int:
    """Return the number of the best policy that does not prewarm."""
    if not history.idles:
        return 0
    ski_rental, lasting, recent = history.bills[:3]
    if min(ski_rental, recent) >= STEADY_MARGIN * lasting:
        return 1
    return 0 if ski_rental <= recent else 2


def _risk(bold: IdlePlan, steady: IdlePlan, costs: Costs) -> float:
    """Return the extra cost of `bold` over `steady` if the idle period ends at the worst moment."""
    moments = [step.offset_s * (1 + 1e-9) + 1e-9 for plan in (bold, steady) for step in plan]
    return max(costs.bill(bold, moment) - costs.bill(steady, moment) for moment in moments)


def learn(
    history: History, ladder: Ladder, idle_s: float, since_s: float,
    burst_waits: Sequence[BurstWait], prior: Prior = NO_PRIOR,
) -> History:  # fmt: skip
    """Return the history after an idle period that ended after `idle_s` seconds.

    `since_s` is the argument that `choose` had at the beginning of the period. `burst_waits` has for each rung how long
    arrivals would have waited for a wake from the rung. It counts the arrivals that no earlier call has counted,
    including the arrival that ended the period. An arrival that ends an idle period begins such a wake, whatever the
    rung was, unless a wake is under way.
    """
    experts = _experts(history, ladder, prior)
    costs = history.costs(ladder)
    due = [costs.bill(experts.plan(expert, since_s), idle_s) for expert in range(CANDIDATES)]
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
    """Return True if the policies should make new plans. They do so less often for a long history, which a period changes less."""
    return periods % (1 if periods <= 32 else 4 if periods <= 128 else 16) == 0


def _experts(history: History, ladder: Ladder, prior: Prior) -> _Candidates:
    """Return the policies of a history. If a deploy has changed the number of rungs, make new plans."""
    known = history.experts
    if known is None or known.rungs != len(ladder.rungs):
        return _consult(history, ladder, prior)
    return known


def _consult(history: History, ladder: Ladder, prior: Prior) -> _Candidates:
    costs, node = history.costs(ladder), prior.cdf()

    def strategy(samples: Sequence[float], *, climbs: bool) -> Strategy:
        return cheapest(distribution_of(samples, costs, node, climbs=climbs), costs, climbs=climbs)

    idles, intervals = history.idles, history.intervals
    lasting, climbing = strategy(idles, climbs=False).plan(), strategy(intervals, climbs=True)
    if len(idles) <= RECENT:
        return _Candidates((costs.ski_rental, lasting, lasting), (climbing, climbing))
    recent = strategy(idles[-RECENT:], climbs=False).plan()
    return _Candidates(
        (costs.ski_rental, lasting, recent), (climbing, strategy(intervals[-RECENT:], climbs=True))
    )

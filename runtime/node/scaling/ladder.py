"""Defines the rungs on which a function can be kept warm, the cost of each rung, and a plan for one idle period.

The rungs of a ladder are numbered from the top: 0 is READY, and a lower rung has a higher number. Rungs have no names in this
module. Two measured figures describe a rung: its price in money per second, and the seconds from the rung to READY.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias


class Rung(NamedTuple):
    """One rung: the price of holding it, in money per second, and the seconds from it to READY."""

    hold_per_s: float
    wake_s: float


class Step(NamedTuple):
    """`offset_s` seconds after the end of the last request, the function steps to `rung`."""

    offset_s: float
    rung: int


IdlePlan: TypeAlias = tuple[Step, ...]
"""The rungs of one idle period, in the order of their offsets. The first offset is 0.

A step down is instant. A step up is a prewarm: it takes the difference of the wake times, and meanwhile the upper
rung's price is paid. The next step up begins after the end of this step. A step to the present rung changes nothing.
"""


class Stay(NamedTuple):
    """A part of an idle period: the seconds for which the price of `rung` is paid."""

    rung: int
    seconds: float


class Course(NamedTuple):
    """An idle period under a plan."""

    stays: list[Stay]
    rung: int
    """The rung of the last step before the end."""
    to_ready_s: float
    """The seconds to READY at the end: the wake time of the rung, or more if a prewarm is under way."""


def course(plan: IdlePlan, wakes: Sequence[float], idle_s: float) -> Course:
    """Return the course of an idle period of `idle_s` seconds. A step at its very end is not taken."""
    rung, begun_s, to_ready_s, stays = plan[0].rung, 0.0, wakes[plan[0].rung], list[Stay]()
    for offset_s, following in plan[1:]:
        if offset_s >= idle_s:
            break
        stays.append(Stay(rung, offset_s - begun_s))
        to_ready_s = max(wakes[following], wakes[rung], to_ready_s - (offset_s - begun_s))
        rung, begun_s = following, offset_s
    stays.append(Stay(rung, idle_s - begun_s))
    return Course(stays, rung, max(wakes[rung], to_ready_s - (idle_s - begun_s)))


class BurstWait(NamedTuple):
    """The total time that arrivals would have waited for wakes from one rung. During a wake, no other wake begins."""

    waited_s: float = 0.0
    wakes: int = 0


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs from READY down, and the price of a second of one caller's waiting, in the same money."""

    rungs: tuple[Rung, ...]
    wait_per_s: float

    def __post_init__(self) -> None:
        wakes = [rung.wake_s for rung in self.rungs]
        if not wakes or wakes[0] != 0 or wakes != sorted(wakes):
            raise ValueError(f"the wake times of a ladder start with 0 and ascend, not {wakes}")

    def costs(self, burst_waits: Sequence[float] = ()) -> Costs:
        """Return the costs of the rungs.

        `burst_waits` has for each rung the total seconds that an arrival on the rung, and the arrivals after it, wait.
        Without `burst_waits`, an arrival waits alone, for the rung's wake time.
        """
        holds = tuple(rung.hold_per_s for rung in self.rungs)
        wakes = tuple(rung.wake_s for rung in self.rungs)
        waits = tuple(burst_waits) or wakes
        # READY's price is paid during the wake.
        pairs = zip(waits, wakes, strict=True)
        penalties = tuple(self.wait_per_s * waited + holds[0] * wake for waited, wake in pairs)
        return Costs(holds, wakes, penalties)


@dataclass(frozen=True)
class Costs:
    """For each rung: the price of a second on it, the seconds from it to READY, and the cost of an arrival on it."""

    holds: tuple[float, ...]
    wakes: tuple[float, ...]
    penalties: tuple[float, ...]

    @cached_property
    def ski_rental(self) -> IdlePlan:
        """The plan that stands at each time on the rung for which the penalty plus the holding cost so far is least.

        It costs at most twice the best rung in hindsight: the deterministic multi-slope ski rental of Lotker,
        Patt-Shamir and Rawitz, "Rent, lease or buy: randomized algorithms for multislope ski rental" (2008).
        """
        steps, rung, at_s = [Step(0.0, self._first())], self._first(), 0.0
        while True:
            following = [
                (crossing, lower)
                for lower in range(rung + 1, len(self.holds))
                if (crossing := self._crossing(rung, lower)) < math.inf
            ]
            if not following:
                return tuple(steps)
            # If several rungs are reached at the same time, take the lowest: it is the cheapest to hold.
            at_s, rung = min(following, key=lambda found: (max(found[0], at_s), -found[1]))
            steps.append(Step(max(at_s, steps[-1].offset_s), rung))

    def bill(self, plan: IdlePlan, idle_s: float) -> float:
        """Return the cost of an idle period of `idle_s` seconds under `plan`, including the arrival at its end."""
        stays, rung, to_ready_s = course(plan, self.wakes, idle_s)
        held = sum(self.holds[stay.rung] * stay.seconds for stay in stays)
        return held + (self._penalty(to_ready_s) if to_ready_s > self.wakes[rung] else self.penalties[rung])

    def _penalty(self, to_ready_s: float) -> float:
        """Return the cost of an arrival in the middle of a prewarm, between the penalties of two rungs."""
        lower = bisect.bisect_left(self.wakes, to_ready_s)
        fast_s, slow_s = self.wakes[lower - 1 : lower + 1]
        less, more = self.penalties[lower - 1 : lower + 1]
        return less + (more - less) * (to_ready_s - fast_s) / (slow_s - fast_s)

    def _first(self) -> int:
        least = min(self.penalties)
        return max(rung for rung, penalty in enumerate(self.penalties) if penalty == least)

    def _crossing(self, upper: int, lower: int) -> float:
        """Return when the lower rung becomes cheaper, in seconds from the start of the idle period."""
        saved = self.holds[upper] - self.holds[lower]
        if saved <= 0:
            return math.inf
        return max(0.0, (self.penalties[lower] - self.penalties[upper]) / saved)

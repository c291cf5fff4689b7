"""Makes plans from the rungs on which a function should stand at certain times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from .ladder import IdlePlan, Step


class _Arrival(NamedTuple):
    """The function begins the step to `rung` at `offset_s`, and stands on it from `reached_s` on."""

    offset_s: float
    rung: int
    reached_s: float


class PlanRoute:
    """Makes a plan of rungs and the times at which each must be reached."""

    def __init__(self, rung: int, wakes: Sequence[float]) -> None:
        self._wakes = wakes
        self._stays = [_Arrival(0.0, rung, 0.0)]

    def reach(self, rung: int, at_s: float) -> None:
        """Stand on `rung` at `at_s`. A step up begins earlier, by the time that it takes.

        Leave out earlier stays that would not be reached before this step begins.
        """
        stays = self._stays
        while len(stays) > 1 and at_s - self._climb_s(rung) <= stays[-1].reached_s:
            left = stays.pop()
            if rung >= stays[-1].rung:
                at_s = min(at_s, left.offset_s)
        if (offset_s := at_s - self._climb_s(rung)) <= 0:
            self._stays = [_Arrival(0.0, rung, 0.0)]
        elif stays[-1].rung != rung:
            stays.append(_Arrival(offset_s, rung, at_s))

    def plan(self) -> IdlePlan:
        stays = list(self._stays)
        # Drop a climb at the end of the plan. No call is expected after the last bin, so no call would end this last stay.
        while len(stays) > 1 and stays[-1].rung < stays[-2].rung:
            stays.pop()
        steps = [Step(0.0, stays[0].rung)]
        for before, stay in pairwise(stays):
            steps += self._stages(before.rung, stay)
        return tuple(steps)

    def _stages(self, before: int, stay: _Arrival) -> Iterator[Step]:
        """Yield the steps to a stay. A climb goes rung by rung: a rung is not paid before the rung below is reached."""
        if stay.rung > before:
            yield Step(stay.offset_s, stay.rung)
        for rung in reversed(range(stay.rung, before)):
            if self._wakes[rung + 1] > self._wakes[rung]:
                yield Step(stay.offset_s + self._wakes[before] - self._wakes[rung + 1], rung)

    def _climb_s(self, rung: int) -> float:
        return max(0.0, self._wakes[self._stays[-1].rung] - self._wakes[rung])


def clamped(plan: IdlePlan, steady: IdlePlan, lowest: int, wakes: Sequence[float]) -> IdlePlan:
    """Return `plan` with each rung below `lowest` replaced by `lowest`, or by the rung of `steady` if that is lower.

    `steady` has no steps up. At a step up, the result reaches the upper rung at the same time as `plan`.
    """
    bold, usual = list(reached(plan, wakes)), list(reached(steady, wakes))
    route, rung = None, -1
    for at_s in sorted({step.offset_s for step in (*bold, *usual)}):
        following = min(_rung(bold, at_s), max(lowest, _rung(usual, at_s)))
        if route is None:
            route = PlanRoute(following, wakes)
        elif following != rung:
            route.reach(following, at_s)
        rung = following
    return route.plan() if route is not None else plan


def reached(plan: IdlePlan, wakes: Sequence[float]) -> Iterator[Step]:
    """Yield the steps of a plan. The offset of each yielded step is the time at which its rung is reached."""
    yield plan[0]
    for (_, before), (offset_s, rung) in pairwise(plan):
        yield Step(offset_s + max(0.0, wakes[before] - wakes[rung]), rung)


def _rung(steps: Sequence[Step], at_s: float) -> int:
    return [step.rung for step in steps if step.offset_s <= at_s][-1]

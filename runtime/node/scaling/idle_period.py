"""Finds the idle periods of a function, the rung of a plan at a time, and how long the arrivals after a wake would have waited.

It reads no clock: `now_s` is the time on any clock that does not jump.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from .idle_distribution import LONGEST_S
from .ladder import BurstWait, IdlePlan, Step

# An idle period counts only if it lasts longer than this. Its length is still measured from the end of the last
# request.
QUIET_S = 0.5


@dataclass(slots=True)
class IdlePeriod:
    """A time without requests that has begun."""

    begun_s: float
    """The end of the last request."""
    since_s: float
    """The seconds from the arrival that ended the previous period to the beginning of this period."""
    planned_from_s: float
    """The time from which the offsets of its plan count."""
    known: bool = True
    """False if its length is not learned: it began with a deploy, or calls may have come while no gateway ran."""

    def rung(self, plan: IdlePlan, now_s: float) -> int:
        """Return the rung on which `plan` stands at `now_s`."""
        passed = [step for step in plan if step.offset_s <= now_s - self.planned_from_s]
        return (passed or plan)[-1 if passed else 0].rung

    def later(self, plan: IdlePlan, now_s: float) -> Iterator[Step]:
        """Yield the steps of `plan` after `now_s`. The offset of each yielded step is the time at which the step is
        due.

        Steps later than LONGEST_S are left out: they are never taken.
        """
        for offset_s, rung in plan:
            if now_s - self.planned_from_s < offset_s <= LONGEST_S:
                yield Step(self.planned_from_s + offset_s, rung)


class IdleWatch:
    """Finds where idle periods begin and end."""

    def __init__(self) -> None:
        self.period: IdlePeriod | None = None
        self._woken_s: float | None = None
        self._quiet_from_s: float | None = None

    def quiet(self, now_s: float, last_end_s: float | None) -> float | None:
        """Record that no request runs or waits. Return when to look again; None if an idle period has begun.

        `last_end_s` is the end of the last request; None if the workers that could report it have ended.
        """
        if self.period is not None:
            return None
        known = [end_s for end_s in (last_end_s, self._quiet_from_s) if end_s is not None]
        self._quiet_from_s = min(now_s, max(known)) if known else now_s
        if now_s < (begins_s := self._quiet_from_s + QUIET_S):
            return begins_s
        self.open(self._quiet_from_s, self._quiet_from_s)
        return None

    def busy(self, now_s: float) -> IdlePeriod | None:
        """Record that a request runs or waits. Return the idle period that this request ends; None if no period was
        open.
        """
        self._quiet_from_s = None
        period, self.period = self.period, None
        if period is not None:
            self._woken_s = now_s
        return period

    def open(self, begun_s: float, planned_from_s: float, *, known: bool = True) -> IdlePeriod:
        """Begin a period."""
        woken_s = begun_s if self._woken_s is None else self._woken_s
        self.period = IdlePeriod(begun_s, max(0.0, begun_s - woken_s), planned_from_s, known)
        return self.period

    def resume(self, begun_s: float, since_s: float) -> None:
        """Continue a period that began before this watch was made."""
        self._woken_s = begun_s - since_s
        self.open(begun_s, begun_s, known=False)

    def interrupt(self) -> None:
        """Forget the present period: it is no idle time, because the function cannot serve."""
        self.period = self._quiet_from_s = None


class Followers:
    """For each rung, the wake that the arrival at the end of an idle period would begin on that rung, and how long this
    and later arrivals would wait for the wake.
    """

    def __init__(self, woken_s: float, wakes_s: Sequence[float], before: Followers | None = None) -> None:
        """`wakes_s` are the wake times of the rungs, and `before` are the wakes of the previous period. During a wake
        from a rung, no other wake begins from that rung.
        """
        past_s = before.begun_s if before is not None and len(before.begun_s) == len(wakes_s) else ()
        lasts_s = past_s or (-math.inf,) * len(wakes_s)
        self.begun_s: tuple[float, ...] = tuple(
            last_s if woken_s < last_s + wake_s else woken_s
            for last_s, wake_s in zip(lasts_s, wakes_s, strict=True)
        )
        """When the last wake from each rung began."""
        self.from_s = woken_s - QUIET_S
        """Arrivals before this time are ignored, because they belong to earlier periods."""
        self.until_s = woken_s + max(wakes_s, default=0.0)
        """When the longest wake ends. Later arrivals do not count."""
        self._woken_s = woken_s

    def waits(self, wakes_s: Sequence[float], arrivals_s: Iterable[float]) -> tuple[BurstWait, ...]:
        """For each wake time, return the total seconds that the arrivals during such a wake would have waited.

        Each arrival waits for the rest of the wake. `arrivals_s` are in no order. The earliest arrival since `from_s` ended
        the period, so it waits for the whole wake. If there is no such arrival, count one.
        """
        later_s = (arrival_s for arrival_s in arrivals_s if arrival_s >= self.from_s)
        delays_s = sorted(max(0.0, arrival_s - self._woken_s) for arrival_s in later_s)
        delays_s[:1] = [0.0]
        begun_s = self.begun_s if len(self.begun_s) == len(wakes_s) else (self._woken_s,) * len(wakes_s)
        return tuple(
            BurstWait(math.fsum(max(0.0, wake_s - delay_s) for delay_s in delays_s), 1)
            if last_s == self._woken_s
            else BurstWait()
            for last_s, wake_s in zip(begun_s, wakes_s, strict=True)
        )

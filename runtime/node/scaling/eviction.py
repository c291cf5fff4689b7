"""Chooses which idle function gives memory back when the node's memory is short. It does no I/O and reads no clock."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class StepDown:
    """A step that an idle function could take down its ladder."""

    name: str
    idle_s: float
    extra_wake_s: float
    """How many seconds longer its next call waits after the step."""
    freed_bytes: float
    gaps: Gaps

    @property
    def waiting(self) -> float:
        """The additional waiting of callers in seconds per second: the expected rate of calls times `extra_wake_s`."""
        return self.gaps.rate(self.idle_s) * self.extra_wake_s


class Gaps:
    """A function's last idle times, sorted and summed, so that `rate` is fast."""

    def __init__(self, idles: Sequence[float]) -> None:
        self._ascending = sorted(idles)
        self._sums = [0.0, *accumulate(self._ascending)]

    def rate(self, idle_s: float) -> float:
        """Return the expected calls per second after `idle_s` seconds without a call.

        The rate is the number of idle times longer than `idle_s`, divided by the total time that they lasted beyond
        `idle_s`. The constants account for idle times that were never observed, and keep the rate above 0.
        """
        at_most = bisect.bisect_right(self._ascending, idle_s)
        longer = len(self._ascending) - at_most
        rest_s = self._sums[-1] - self._sums[at_most] - longer * idle_s
        return (longer + 0.5) / (rest_s + idle_s + 1.0)


def waiting_per_byte(step: StepDown) -> float:
    """Return the additional waiting of the callers, in seconds per second, for each byte that a step frees."""
    return step.waiting / step.freed_bytes


def steps_down(ladders: Iterable[Sequence[StepDown]], needed_bytes: float) -> list[StepDown]:
    """Return the cheapest steps that free `needed_bytes` together, in the order in which to take them.

    Each of `ladders` has the steps of one function, from its present rung down. If all steps together free less than
    `needed_bytes`, return all steps.
    """
    offered = [
        (waiting_per_byte(steps[0]), number, steps, 0) for number, steps in enumerate(ladders) if steps
    ]
    heapq.heapify(offered)
    taken = list[StepDown]()
    while needed_bytes > 0 and offered:
        _, number, steps, place = heapq.heappop(offered)
        taken.append(steps[place])
        needed_bytes -= steps[place].freed_bytes
        if (place := place + 1) < len(steps):
            heapq.heappush(offered, (waiting_per_byte(steps[place]), number, steps, place))
    return taken

"""Makes the ladder for which the keep-alive policy plans, from the measurements and the prices of one function's rungs.

It does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import NamedTuple

from ...ground.telemetry.rung_name import RungName
from .ladder import Ladder
from .rung_figures import HoldingPrices, RungFigures
from .slow_share import SlowShare

PLANNED = (RungName.READY, RungName.ZYGOTE, RungName.RESIDENT, RungName.LOCAL)


class LadderSpec(NamedTuple):
    """The rungs that the owner allows, their prices, and the owner's target for slow requests."""

    rungs: tuple[RungName, ...] = PLANNED
    prices: HoldingPrices = HoldingPrices()
    planned: bool = True
    """False if the settings have a fixed timeout or a minimum of workers: then the ladder learns, but plans nothing."""
    slow_share: float | None = None
    """The share of requests that may be slow. If it is given, the price of waiting follows from it."""

    def number(self, rung: RungName) -> int:
        """Return the number of `rung`, or of the lowest rung if the owner excludes `rung`."""
        return self.rungs.index(rung) if rung in self.rungs else len(self.rungs) - 1

    def below(self, rung: RungName) -> tuple[RungName, ...]:
        """Return the rungs below `rung`, from the highest down: only LOCAL if the owner excludes `rung`."""
        return self.rungs[self.rungs.index(rung) + 1 :] if rung in self.rungs else (RungName.LOCAL,)


class MeasuredLadder:
    """The measurements of one function's rungs, and the ladder that follows from them at the owner's prices."""

    def __init__(self) -> None:
        self.spec, self.figures, self.slow_share = LadderSpec(), RungFigures(), SlowShare()
        # The numbers of slow requests and of all requests when `slow_share` last learned from them.
        self._counted = (0, 0)
        # The wake that is under way: the rung on which it began, and the time of its beginning.
        self._woken_from: tuple[RungName, float] | None = None

    def adopt(self, spec: LadderSpec, figures: RungFigures, slow: tuple[int, int]) -> None:
        """Switch to another revision: replace the spec and the figures, and stop measuring a wake that has begun. `slow` has the revision's
        totals so far of slow invocations and of all invocations, from which `count_slow` counts.
        """
        self.spec, self.figures, self._counted, self._woken_from = spec, figures, slow, None

    @property
    def ladder(self) -> Ladder:
        """The ladder of the rungs that the owner allows."""
        return self.figures.ladder(self.spec.rungs, self.prices)

    @property
    def prices(self) -> HoldingPrices:
        """The present prices of holding and of waiting for this function."""
        prices = self.spec.prices
        if self.spec.slow_share is None:
            return prices
        return prices._replace(waiting_s=self.slow_share.price(prices.waiting_s))

    # -- the measurements

    def begin_wake(self, rung: RungName, now_s: float) -> None:
        """Start to measure a wake, which begins now on `rung`."""
        self._woken_from = rung, now_s

    def end_wake(self, now_s: float, *, usual: bool, devices: float) -> bool:
        """End the measurement of a wake, because a worker is ready. Return True if the ladder was measured.

        If the start was not `usual`, its time does not predict later wakes. `devices` is the number of GPUs that the worker
        holds.
        """
        begun, self._woken_from = self._woken_from, None
        if begun is None or not usual:
            return False
        rung, begun_s = begun
        self.figures = self.figures.with_wake(rung, now_s - begun_s, devices=devices)
        return True

    def note_held(self, rung: RungName, held_bytes: float) -> None:
        """Record how much memory all processes hold on a rung."""
        self.figures = self.figures.with_held(rung, held_bytes)

    def count_slow(self, slow: tuple[int, int]) -> None:
        """Learn from `slow`: the total number of slow invocations so far, and of all invocations so far."""
        if self.spec.slow_share is None:
            return
        new_slow, requests = (now - before for now, before in zip(slow, self._counted, strict=True))
        self._counted = slow
        self.slow_share = self.slow_share.learn(self.spec.slow_share, new_slow, requests)

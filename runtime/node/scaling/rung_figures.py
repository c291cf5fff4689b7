"""Makes a function's ladder from two measurements for each rung: the memory that it holds, and its seconds to READY."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from ...ground.telemetry.rung_name import RungName
from .ladder import Ladder, Rung

WAKES_KEPT = 16
# Guesses until there is a measurement.
_MIB = float(1 << 20)
GUESSED_BYTES = {RungName.READY: 64 * _MIB, RungName.ZYGOTE: 24 * _MIB, RungName.LOCAL: 0.0}
GUESSED_WAKE_S = {RungName.ZYGOTE: 0.03, RungName.RESIDENT: 0.3, RungName.LOCAL: 0.3}
LEAST_WAKE_S = 0.001


class HoldingPrices(NamedTuple):
    """The prices of holding and of waiting, in the same money."""

    memory_byte_s: float = 3e-15
    device_s: float = 0.0008
    waiting_s: float = 0.001


@dataclass(frozen=True, slots=True)
class RungFigures:
    """The measurements of one revision."""

    held_bytes: Mapping[RungName, float] = field(default_factory=lambda: MappingProxyType({}))
    """By rung, the memory of all its processes and of its fetched weights."""
    wakes_s: Mapping[RungName, tuple[float, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """By rung, the latest measured times from the rung to READY, in seconds, the newest last."""
    build_s: float = 0.0
    """How long its zygote took to import and build the handler."""
    devices: float = 0.0
    """The number of GPUs that a worker holds. A part of a GPU counts as its share."""

    def with_held(self, rung: RungName, held_bytes: float) -> RungFigures:
        return replace(self, held_bytes={**self.held_bytes, rung: held_bytes})

    def with_wake(self, rung: RungName, wake_s: float, *, devices: float) -> RungFigures:
        kept = (*self.wakes_s.get(rung, ()), wake_s)[-WAKES_KEPT:]
        return replace(self, wakes_s={**self.wakes_s, rung: kept}, devices=devices)

    def of_next_revision(self, build_s: float) -> RungFigures:
        """Return the figures with which a new revision begins: the figures of this revision are guesses for it."""
        wakes = {rung: (_usual(kept),) for rung, kept in self.wakes_s.items() if kept}
        return replace(self, wakes_s=wakes, build_s=build_s)

    def held(self, rung: RungName) -> float:
        """Return the bytes of memory held on a rung."""
        return self.held_bytes.get(rung, GUESSED_BYTES.get(rung, 0.0))

    def wake(self, rung: RungName) -> float:
        """Return the seconds from a rung to READY."""
        if rung is RungName.READY:
            return 0.0
        if kept := self.wakes_s.get(rung):
            return max(LEAST_WAKE_S, _usual(kept))
        return GUESSED_WAKE_S.get(rung, 0.0) + (self.build_s if rung is not RungName.ZYGOTE else 0.0)

    def ladder(self, rungs: Sequence[RungName], prices: HoldingPrices) -> Ladder:
        """Return the ladder of these rungs, from READY down. A lower rung never costs more or wakes faster."""
        holds = [self.held(rung) * prices.memory_byte_s for rung in rungs]
        holds[0] += self.devices * prices.device_s
        wakes = [self.wake(rung) for rung in rungs]
        for index in range(1, len(rungs)):
            wakes[index] = max(wakes[index], wakes[index - 1])
            holds[-index - 1] = max(holds[-index - 1], holds[-index])
        return Ladder(tuple(map(Rung, holds, wakes)), prices.waiting_s)


def _usual(wakes_s: Sequence[float]) -> float:
    """Return the 90th percentile of wake times."""
    return sorted(wakes_s)[math.ceil(0.9 * len(wakes_s)) - 1]


def differs(old: Ladder, new: Ladder, share: float = 0.2) -> bool:
    """Return True if a figure of two ladders differs by more than `share`, so that plans should be made anew."""
    if len(old.rungs) != len(new.rungs):
        return True
    pairs = [(old.wait_per_s, new.wait_per_s)]
    for before, after in zip(old.rungs, new.rungs, strict=True):
        pairs += zip(before, after, strict=True)
    return any(abs(one - other) > share * max(one, other) for one, other in pairs)

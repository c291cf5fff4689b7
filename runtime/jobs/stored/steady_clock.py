"""Reads Unix seconds that do not jump when the system's clock is set, so that stored waits neither end early nor last longer."""

from __future__ import annotations

import time
from collections.abc import Callable

NOTICED_S = 2.0
"""Smaller differences are ignored, so that no rows change while the system's clock is slewed."""


def since_boot_s() -> float:
    """Return the seconds since the machine started, including the time during which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Returns the Unix seconds of its creation, plus the real time since then."""

    def __init__(
        self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = since_boot_s
    ) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._offset_s = wall() - elapsed()

    def __call__(self) -> float:
        return self._elapsed() + self._offset_s

    @property
    def behind_s(self) -> float:
        """The seconds by which the system's clock was set forward, negative if it was set back; 0 if they are at most
        NOTICED_S.
        """
        behind_s = self._wall() - self()
        return behind_s if abs(behind_s) > NOTICED_S else 0.0

    def follow(self, by_s: float) -> None:
        """From now on, return `by_s` seconds more. The caller has added the same to the stored times."""
        self._offset_s += by_s

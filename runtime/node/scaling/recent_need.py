"""Remembers how many workers a revision needed recently. It reads no clock."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple


class Peak(NamedTuple):
    """The largest number of workers that was needed at any time in a window that ends now."""

    workers: int = 0
    until_s: float = math.inf
    """When the window no longer includes the peak, unless this number of workers is needed again before that."""


NO_NEED = Peak()


class RecentNeed:
    """The largest number of workers that was wanted within a window that ends now."""

    def __init__(self) -> None:
        # Numbers of workers, each with the last time at which it was wanted. If a larger number was wanted later, the entry is
        # dropped, so the numbers descend.
        self._peaks: deque[tuple[float, int]] = deque()

    def note(self, now_s: float, workers: int) -> None:
        """Remember that `workers` were wanted at `now_s` or shortly before. Ignore 0 workers."""
        if not workers:
            return
        peaks = self._peaks
        while peaks and peaks[-1][1] <= workers:
            peaks.pop()
        peaks.append((now_s, workers))

    def peak(self, now_s: float, window_s: float) -> Peak:
        """Return the largest number that was wanted in the last `window_s` seconds."""
        peaks = (Peak(workers, at_s + window_s) for at_s, workers in self._peaks)
        return next((peak for peak in peaks if peak.until_s > now_s), NO_NEED)

    def forget(self, now_s: float, window_s: float) -> None:
        """Forget the numbers that were wanted before the last `window_s` seconds."""
        while self._peaks and self._peaks[0][0] + window_s <= now_s:
            self._peaks.popleft()

"""Limits how many lines the processes of one function may print, so that the event loop has time for other functions."""

from __future__ import annotations

import time

# A line costs one unit, and one more for each kilobyte. A function may print BURST units at once, and gains PER_S each
# second.
PER_S = 1_000.0
BURST = 10_000.0
KILOBYTE = 1024


class LogAllowance:
    """A token bucket: what the processes of one function may print now."""

    def __init__(self) -> None:
        self._units = BURST
        self._at_s = time.monotonic()

    def take(self, lines: int, size: int, now_s: float) -> int:
        """Return how many of `lines` lines may be printed now, and take their cost. `size` is the number of bytes of all `lines`."""
        self._units = min(BURST, self._units + max(0.0, now_s - self._at_s) * PER_S)
        self._at_s = now_s
        each = 1.0 + size / max(1, lines) / KILOBYTE
        allowed = min(lines, int(self._units / each))
        self._units -= allowed * each
        return allowed

"""The quota of a key: requests per second, and at the same time. Pure: `now_s` is an argument."""

from __future__ import annotations

import math

# Sums of fractions are a hair too small. A caller who waits as long as `enter` returned must be admitted.
_TOLERANCE = 1e-9
# The wait for a caller with too many running requests, whose ends are unknown.
CONCURRENCY_WAIT_S = 1.0


class Meter:
    """One key's use of its quota: running requests, and a token bucket of `burst` tokens refilled at `rate_per_s`."""

    __slots__ = ("_at_s", "_burst", "_concurrency", "_rate_per_s", "_tokens", "running")

    def __init__(
        self, rate_per_s: float | None, burst: int | None, concurrency: int | None, now_s: float
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst or max(1, math.ceil(rate_per_s or 0)))
        self._tokens = self._burst
        self._at_s = now_s
        self._concurrency = math.inf if concurrency is None else concurrency
        self.running = 0

    def enter(self, now_s: float) -> float:
        """Begin a request and return 0.0, and `leave` must follow; or return the seconds to wait before a retry."""
        if self.running >= self._concurrency:
            return CONCURRENCY_WAIT_S
        if self._rate_per_s is not None:
            if now_s > self._at_s:
                self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
                self._at_s = now_s
            if self._tokens < 1.0 - _TOLERANCE:
                return (1.0 - self._tokens) / self._rate_per_s
            self._tokens = max(0.0, self._tokens - 1.0)
        self.running += 1
        return 0.0

    def leave(self) -> None:
        self.running -= 1

"""The quota of a key: requests per second, and at the same time. Pure: `now_s` is an argument."""

from __future__ import annotations

import math

# Sums of fractions are a hair too small. A caller who waits as long as `take` returned must get a token.
_HAIR = 1e-9
# The wait for a caller with too many running requests, whose ends are unknown.
CONCURRENCY_WAIT_S = 1.0


class Bucket:
    """A token bucket: full at first with `burst` tokens, refilled at `rate_per_s`."""

    __slots__ = ("_at_s", "_tokens", "burst", "rate_per_s")

    def __init__(self, rate_per_s: float, burst: float, now_s: float) -> None:
        self.rate_per_s = rate_per_s
        self.burst = burst
        self._tokens = float(burst)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take a token and return 0.0, or take none and return the seconds until there is one."""
        if now_s > self._at_s:
            self._tokens = min(self.burst, self._tokens + (now_s - self._at_s) * self.rate_per_s)
            self._at_s = now_s
        if self._tokens >= 1.0 - _HAIR:
            self._tokens = max(0.0, self._tokens - 1.0)
            return 0.0
        return (1.0 - self._tokens) / self.rate_per_s


class Meter:
    """One key's use of its quota."""

    __slots__ = ("_bucket", "_concurrency", "running")

    def __init__(
        self, rate_per_s: float | None, burst: int | None, concurrency: int | None, now_s: float
    ) -> None:
        self._bucket = None
        if rate_per_s is not None:
            self._bucket = Bucket(rate_per_s, burst or max(1, math.ceil(rate_per_s)), now_s)
        self._concurrency = math.inf if concurrency is None else concurrency
        self.running = 0

    def enter(self, now_s: float) -> float:
        """Begin a request and return 0.0, and `leave` must follow; or return the seconds to wait before a retry."""
        if self.running >= self._concurrency:
            return CONCURRENCY_WAIT_S
        wait_s = self._bucket.take(now_s) if self._bucket is not None else 0.0
        if wait_s == 0.0:
            self.running += 1
        return wait_s

    def leave(self) -> None:
        self.running -= 1

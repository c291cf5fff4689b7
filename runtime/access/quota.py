"""The quota: how many requests a key may make a second, and at the same time. Pure: `now_s` is an argument."""

from __future__ import annotations

import math

# Sums of fractions come out a hair short; whoever waited as long as was asked must get what was promised.
_HAIR = 1e-9
# How long somebody waits who has too many requests running: nobody knows when one of them ends.
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
        """Takes a token: 0.0. Or takes nothing, and says after how many seconds there will be one."""
        if now_s > self._at_s:
            self._tokens = min(self.burst, self._tokens + (now_s - self._at_s) * self.rate_per_s)
            self._at_s = now_s
        if self._tokens >= 1.0 - _HAIR:
            self._tokens = max(0.0, self._tokens - 1.0)
            return 0.0
        return (1.0 - self._tokens) / self.rate_per_s


class Meter:
    """What one key has used of its quota."""

    __slots__ = ("_bucket", "_concurrency", "_running")

    def __init__(
        self, rate_per_s: float | None, burst: int | None, concurrency: int | None, now_s: float
    ) -> None:
        self._bucket = None
        if rate_per_s is not None:
            self._bucket = Bucket(rate_per_s, burst or max(1, math.ceil(rate_per_s)), now_s)
        self._concurrency = math.inf if concurrency is None else concurrency
        self._running = 0

    @property
    def running(self) -> int:
        return self._running

    def enter(self, now_s: float) -> float:
        """Begins a request: 0.0, and `leave` must follow. Or begins none, and says for how many seconds not to try."""
        if self._running >= self._concurrency:
            return CONCURRENCY_WAIT_S
        wait_s = self._bucket.take(now_s) if self._bucket is not None else 0.0
        if wait_s == 0.0:
            self._running += 1
        return wait_s

    def leave(self) -> None:
        self._running -= 1

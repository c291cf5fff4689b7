"""When a webhook that was not taken is tried again: exponential back-off with full jitter, and when it is given up."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import mktime_tz, parsedate_tz

LONGEST_WISH_S = 86400.0
"""What a receiver may ask for with Retry-After; more is cut down to this."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`tries` attempts; the n-th pause is drawn from 0 to `first_s * factor ** (n - 1)`, at most to `longest_s`.

    The usual one takes 25 hours on average: half of all its upper bounds together.
    """

    tries: int = 16
    first_s: float = 10.0
    factor: float = 3.0
    longest_s: float = 6 * 3600.0

    def bound_s(self, tried: int) -> float:
        """The longest pause after that many attempts, at least one."""
        bound = self.first_s
        for _ in range(tried - 1):
            bound = min(bound * self.factor, self.longest_s)
        return min(bound, self.longest_s)

    def pause_s(self, tried: int, chance: float, *, wish_s: float = 0.0) -> float | None:
        """How long to wait after that many attempts; None: give it up.

        `chance` lies in [0, 1]. `wish_s` is the receiver's own Retry-After: never sooner than that.
        """
        if tried >= self.tries:
            return None
        return max(self.bound_s(tried) * chance, min(wish_s, LONGEST_WISH_S))


def wish_s(retry_after: str, now_s: float) -> float:
    """What a Retry-After header asks for, in seconds from now; 0 where it asks for nothing that can be understood."""
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    parts = parsedate_tz(text)
    if parts is None:
        return 0.0
    try:
        moment_s = mktime_tz((*parts[:9], parts[9] or 0))  # no zone: GMT, the only one that is allowed there
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, moment_s - now_s)

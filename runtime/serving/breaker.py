"""Stops starting the workers of a revision that fail to start again and again."""

from __future__ import annotations

import math

from ...errors import CrashLoop, PilotflameError

# After n failed starts in a row, workers that only `min` and `buffer` ask for are not started for
# FIRST_BACKOFF_S x 2^(n - 1) seconds, at most MAX_BACKOFF_S. Workers for waiting invocations are started without
# this delay, until MAX_FAILURES starts have failed in a row.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 300.0
MAX_FAILURES = 5


class Breaker:
    """Counts the failed starts since a worker was ready. It opens at MAX_FAILURES of them.

    While it is open, invocations are refused at once with the reason of the last failure. After the back-off, one
    more start may be tried. If that fails too, it is open for twice as long.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.backoff_until_s = 0.0
        """Until this time, no worker is started that no invocation waits for."""
        self._error: PilotflameError | None = None

    def fail(self, error: PilotflameError, now_s: float) -> None:
        """Count a failed start."""
        self.failures += 1
        self._error = error
        backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.failures - 1, 16))
        self.backoff_until_s = now_s + backoff_s

    def reset(self) -> None:
        """Forget all failures: a worker is ready, or somebody has mended the cause."""
        self.failures, self.backoff_until_s, self._error = 0, 0.0, None

    def open(self, now_s: float) -> bool:
        return self.failures >= MAX_FAILURES and now_s < self.backoff_until_s

    def refusal(self, function: str, now_s: float) -> CrashLoop:
        """Return the error of an invocation that arrives while the breaker is open."""
        error = self._error
        wait_s = max(0.0, self.backoff_until_s - now_s)
        why = "" if error is None else f" The last error: {error.message}"
        details = {} if error is None else error.details | error.private | {"cause": error.code}
        return CrashLoop(
            f"The last {self.failures} starts of a worker of {function} failed. The next is tried in"
            f" {math.ceil(wait_s)} s.{why}",
            remedy=f"Mend the handler and deploy it again. If the cause was elsewhere: pilotflame reset {function}",
            details=details | {"retry_after_s": wait_s},
        )

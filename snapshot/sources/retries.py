"""Decides whether and when an operation that failed is tried again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from ...errors import SourceUnavailable

ATTEMPTS = 6
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
T = TypeVar("T")


class Retries:
    """Counts the consecutive failures of one operation, and waits before each retry."""

    def __init__(self) -> None:
        self._failures = 0

    def wait(self, error: SourceUnavailable) -> None:
        """Count a failure and wait before the next attempt. Raise `error` if there is no further attempt."""
        self._failures += 1
        if self._failures >= ATTEMPTS:
            raise error
        # Nothing sets this event: only the timeout ends the wait.
        threading.Event().wait(delay_s(self._failures, error.retry_after_s))


def retried(attempt: Callable[[], T]) -> T:
    """Return what `attempt` returns. Call it again after temporary failures, ATTEMPTS times in all."""
    retries = Retries()
    while True:
        try:
            return attempt()
        except SourceUnavailable as error:
            retries.wait(error)


def delay_s(attempt: int, retry_after_s: float | None = None) -> float:
    """Return the seconds to wait after `attempt` failures in a row: a random time, but at least the Retry-After.

    The method is called full jitter: M. Brooker, "Exponential backoff and jitter" (AWS architecture blog,
    2015).
    """
    drawn_s = random.uniform(0, min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**attempt))  # noqa: S311  not a secret
    return max(drawn_s, min(retry_after_s or 0.0, 2 * LONGEST_DELAY_S))

"""A webhook delivery: one event of one job, its attempts, and the schedule of retries."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass

MAX_RETRY_AFTER_S = 86400.0
"""The longest Retry-After that is honoured."""
GONE = 410
"""The HTTP status of a receiver that wants no further attempts."""


class DeliveryState(enum.StrEnum):
    """The state of a delivery."""

    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One HTTP request. `status` is 0 if no response came; then `error` says why.

    Stored as JSON under these names, so a rename would break existing databases.
    """

    at_s: float
    status: int
    error: str
    ms: int
    wish_s: float = 0.0
    """What the receiver's Retry-After header asks for."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A row of `deliveries`. Times are Unix timestamps in seconds. The id is sent as `webhook-id`."""

    id: str
    job_id: str
    function: str
    event: str
    url: str
    host: str
    state: DeliveryState
    attempts: int
    """Since the delivery was added, or since it was redelivered on request."""
    next_s: float
    created_s: float
    last_status: int
    last_error: str
    log: tuple[DeliveryAttempt, ...]
    """The latest attempts, oldest first."""
    body: bytes = b""
    """Left out of lists."""


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """Exponential backoff with full jitter, for at most `tries` attempts.

    The n-th pause is drawn from 0 to `first_s * factor ** (n - 1)`, at most `max_s`. The default schedule lasts
    25 hours on average.
    """

    tries: int = 16
    first_s: float = 10.0
    factor: float = 3.0
    max_s: float = 6 * 3600.0
    draw: Callable[[], float] = random.random
    """Returns the random part of a pause, from 0 to 1."""

    def next_state(self, attempt: DeliveryAttempt, tried: int, now_s: float) -> tuple[DeliveryState, float]:
        """Return a delivery's state after its attempt number `tried`, and when it is due again.

        The pause is never shorter than the receiver's Retry-After, up to MAX_RETRY_AFTER_S.
        """
        if 200 <= attempt.status < 300:
            return DeliveryState.DELIVERED, now_s
        if tried >= self.tries or attempt.status == GONE:
            return DeliveryState.DEAD, now_s
        pause_s = min(self.first_s * self.factor ** (tried - 1), self.max_s) * self.draw()
        return DeliveryState.PENDING, now_s + max(pause_s, min(attempt.wish_s, MAX_RETRY_AFTER_S))

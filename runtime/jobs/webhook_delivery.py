"""The delivery: one event of one job on its way to a webhook, and what its attempts came to."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .webhook_backoff import Schedule

MAX_LOG = 20
MAX_ERROR_CHARS = 300
GONE = 410
"""The receiver wants no more of it."""


class DeliveryState(enum.StrEnum):
    """Where a delivery stands."""

    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One request: when, how it was answered (0: it was not, `error` says why), and how long that took."""

    at_s: float
    status: int
    error: str
    ms: int
    wish_s: float = 0.0
    """What the receiver's Retry-After asked for."""

    @property
    def taken(self) -> bool:
        """Whether the receiver has it."""
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class Delivery:
    """A row of `deliveries`; times are Unix timestamps in seconds. The id goes out as `webhook-id`."""

    id: str
    job_id: str
    function: str
    event: str
    url: str
    host: str
    state: DeliveryState
    attempts: int
    """Since it was made or, by hand, made anew."""
    next_s: float
    created_s: float
    last_status: int
    last_error: str
    log: tuple[DeliveryAttempt, ...]
    """The last attempts, oldest first."""
    body: bytes = b""
    """Not there in lists."""


def after(
    attempt: DeliveryAttempt, tried: int, schedule: Schedule, *, now_s: float, chance: float
) -> tuple[DeliveryState, float]:
    """What becomes of a delivery by its attempt number `tried`, and when it is due again."""
    if attempt.taken:
        return DeliveryState.DELIVERED, now_s
    pause_s = schedule.pause_s(tried, chance, wish_s=attempt.wish_s)
    if pause_s is None or attempt.status == GONE:
        return DeliveryState.DEAD, now_s
    return DeliveryState.PENDING, now_s + pause_s

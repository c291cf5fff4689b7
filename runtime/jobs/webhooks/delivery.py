"""Defines webhook deliveries, their attempts and the schedule of retries.

A delivery is for one event of one subject, which is a job or an alert of a function.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MAX_RETRY_AFTER_S = 86400.0
"""If a receiver asks to wait longer than this, the delivery waits only this long."""
MAX_BODY_BYTES = 4 << 20
"""A message contains an input or an output of the job up to this size. In place of a larger one, it has a link to the job."""
MAX_MESSAGE_BYTES = 2 * MAX_BODY_BYTES
"""About the size of the largest message. An event contains the output twice, and a prediction contains the input and the output."""
JOB = "job:"
"""The prefix of the subject of a job's deliveries. The job's id follows the prefix."""
GONE = 410
"""The HTTP status with which a receiver asks for no further attempts."""


class DeliveryState(enum.StrEnum):
    PENDING = "PENDING"
    DELIVERED = "DELIVERED"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class DeliveryAttempt:
    """One attempt to send a delivery, by an HTTP request and its redirects.

    Attempts are stored as JSON with these field names: do not rename fields, since databases contain them.
    """

    at_s: float
    status: int
    """The HTTP status of the last response; 0 if there was none."""
    error: str
    """Why there was no response, else ""."""
    ms: int
    """The duration in milliseconds."""
    wish_s: float = 0.0
    """How many seconds the receiver asks to wait, in the header Retry-After; 0 if it does not ask."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A row of the table `deliveries`. Times are Unix timestamps. The id is sent as `webhook-id`."""

    id: str
    subject: str
    function: str
    event: str
    url: str
    host: str
    state: DeliveryState
    attempts: int
    """The number of attempts since the delivery was added or redelivered. It includes the attempts of a pending
    delivery that this delivery has replaced.
    """
    next_s: float
    """The earliest time of the next attempt."""
    created_s: float
    last_status: int
    last_error: str
    log: tuple[DeliveryAttempt, ...]
    """The latest attempts, oldest first."""
    owner: str = ""
    """The owner of the job, or of the function that an alert is about: the id of an API key."""
    body: bytes = b""
    """The message. It is empty in lists of deliveries, and in a delivery whose message is made only for its sending."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """Headers that continue the trace of the job's caller. They are empty in lists, and once the job is deleted."""

    @property
    def job_id(self) -> str:
        """The id of the job that the delivery reports; "" for an alert."""
        return self.subject.removeprefix(JOB) if self.subject.startswith(JOB) else ""


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """A schedule of at most `tries` attempts, with random pauses that grow exponentially.

    The pause after attempt number n is random, from 0 to the smaller of `max_s` and `first_s * factor ** (n - 1)`.
    If the time in Retry-After is longer, the pause is that time. The pauses of the default schedule are 25 hours in
    total, on average.
    """

    tries: int = 16
    first_s: float = 10.0
    factor: float = 3.0
    max_s: float = 6 * 3600.0
    draw: Callable[[], float] = random.random
    """Returns a random number from 0 to 1. The pause is this number times the longest possible pause."""

    def next_state(self, attempt: DeliveryAttempt, tried: int, now_s: float) -> tuple[DeliveryState, float]:
        """Return a delivery's state after its attempt number `tried`, and the time of its next attempt."""
        if 200 <= attempt.status < 300:
            return DeliveryState.DELIVERED, now_s
        if tried >= self.tries or attempt.status == GONE:
            return DeliveryState.DEAD, now_s
        pause_s = min(self.first_s * self.factor ** (tried - 1), self.max_s) * self.draw()
        return DeliveryState.PENDING, now_s + max(pause_s, min(attempt.wish_s, MAX_RETRY_AFTER_S))

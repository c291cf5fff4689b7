"""The job: an invocation that was stored, its states, and which may follow which."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LOW_PRIORITY = 1
BATCH_PRIORITY = 2
"""The larger the later; callers' jobs have 0."""

EVENTS = ("start", "output", "logs", "completed")
"""What a webhook may ask to be told of."""


class JobState(enum.StrEnum):
    """Where a job stands."""

    IN_QUEUE = "IN_QUEUE"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def final(self) -> bool:
        """Whether it stays so, unless somebody asks for a retry."""
        return self not in (JobState.IN_QUEUE, JobState.IN_PROGRESS)


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.IN_QUEUE: frozenset(
        {JobState.IN_PROGRESS, JobState.CANCELLED, JobState.TIMED_OUT, JobState.FAILED}
    ),
    JobState.IN_PROGRESS: frozenset(
        {JobState.IN_QUEUE, JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT}
    ),
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset({JobState.IN_QUEUE}),
    JobState.CANCELLED: frozenset(),
    JobState.TIMED_OUT: frozenset({JobState.IN_QUEUE}),
}
"""All that may happen. Back into the queue: its worker died, or somebody asked for a retry."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Who is to be told, and of what."""

    url: str
    events: tuple[str, ...] = ("completed",)


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a caller submits. `content_type` "" is JSON. Times in seconds; `owner` is the id of an API key or ""."""

    function: str
    input: bytes
    execution_timeout_s: float
    ttl_s: float
    content_type: str = ""
    owner: str = ""
    priority: int = 0
    max_attempts: int = 3
    webhook: Webhook | None = None
    idempotency: str = ""
    """Another submit with the same, of the same owner to the same function, gives the same job."""
    wanted_id: str = ""
    traceparent: str = ""
    extra: Mapping[str, Any] | None = None
    """JSON that the handler finds in `context.extra`, as the attributes of the event that it came as."""
    max_queued: int | None = None
    """It is refused if so many jobs of its function wait already."""
    max_queued_bytes: int | None = None
    """It is refused if the inputs of its function's queue would be larger than that together."""


@dataclass(frozen=True, slots=True)
class Job:
    """A job as it is stored. Times are Unix timestamps in seconds, 0 where that has not happened yet."""

    id: str
    function: str
    state: JobState
    input: bytes
    content_type: str
    owner: str
    priority: int
    execution_timeout_s: float
    ttl_s: float
    max_attempts: int
    created_s: float
    attempts: int = 0
    """How often it was given to a worker; also the fence: who holds an older number may not finish it."""
    retries: int = 0
    """How often somebody asked for a retry."""
    started_s: float = 0.0
    ended_s: float = 0.0
    due_s: float = 0.0
    """In the queue: not to be taken before."""
    worker: str = ""
    output: bytes | None = None
    output_type: str = ""
    """"" is JSON."""
    error: Mapping[str, Any] | None = None
    """As `PilotflameError.to_wire()` has it."""
    progress: bytes | None = None
    """JSON: what the handler last said of how far it is."""
    logs: str = ""
    """The last lines of a job that failed."""
    pieces: int = 0
    """How many pieces of a streamed answer are stored."""
    webhook: Webhook | None = None
    traceparent: str = ""
    extra: Mapping[str, Any] | None = None
    expires_s: float = 0.0
    """When a final job and its result are forgotten."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How an attempt ended: a final state, with what it brought."""

    state: JobState
    output: bytes | None = None
    output_type: str = ""
    error: Mapping[str, Any] | None = None
    logs: str = ""


@dataclass(frozen=True, slots=True)
class JobCounts:
    """A function's jobs. Finished ones are counted from the beginning, forgotten ones too."""

    in_queue: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    """Timed out ones too."""
    cancelled: int = 0
    retried: int = 0

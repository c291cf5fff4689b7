"""Defines jobs, which are stored invocations, with their states and ids. A caller submits a `NewJob`."""

from __future__ import annotations

import base64
import dataclasses
import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ...ground.telemetry.invocation_end import Source
from ...ground.telemetry.random_ids import RandomIds

if TYPE_CHECKING:
    from ...ground.settings.function_settings import FunctionSettings

# The most bytes of inputs in the queue of a function: with an input of 1 MiB each, 4,096 jobs. max_stored_bytes limits the disk.
MAX_QUEUED_BYTES = 4 << 30
LOW_PRIORITY = 1
BATCH_PRIORITY = 2
"""Priorities: jobs with a smaller number run first. The default is 0."""
EVENTS = ("start", "output", "logs", "completed")
"""The events that a webhook may subscribe to."""
ID_PREFIX = "job-"
_RANDOM = RandomIds(10)


class JobState(enum.StrEnum):
    IN_QUEUE = "IN_QUEUE"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    TIMED_OUT = "TIMED_OUT"

    @property
    def final(self) -> bool:
        """True if the job has ended. After that, only a retry of a FAILED or TIMED_OUT job changes the state."""
        return self not in (JobState.IN_QUEUE, JobState.IN_PROGRESS)


TRANSITIONS: Mapping[JobState, frozenset[JobState]] = {
    JobState.IN_QUEUE: frozenset(JobState) - {JobState.IN_QUEUE, JobState.COMPLETED},
    JobState.IN_PROGRESS: frozenset(JobState) - {JobState.IN_PROGRESS},
    JobState.COMPLETED: frozenset(),
    JobState.FAILED: frozenset({JobState.IN_QUEUE}),
    JobState.CANCELLED: frozenset(),
    JobState.TIMED_OUT: frozenset({JobState.IN_QUEUE}),
}
"""The states that may follow each state. A retry or a failed attempt returns a job to the queue."""


COUNTERS = {
    JobState.IN_QUEUE: "in_queue",
    JobState.IN_PROGRESS: "in_progress",
    JobState.COMPLETED: "completed",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "failed",
    JobState.CANCELLED: "cancelled",
}
"""The field of `JobCounts` for each state."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL to which events of a job are sent, and the names of these events."""

    url: str
    events: tuple[str, ...] = ("completed",)
    form: str = ""
    """The form of the body: "" is an event of Standard Webhooks. Plugins add other forms (`ApiPlugin.webhook_bodies`)."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job as a caller submits it. Times are in seconds."""

    function: str
    input: bytes
    execution_timeout_s: float
    ttl_s: float
    content_type: str = ""
    """The media type of the input; "" means JSON."""
    owner: str = ""
    """The id of the caller's API key; "" if there is none."""
    priority: int = 0
    max_attempts: int = 3
    webhook: Webhook | None = None
    idempotency: str = ""
    """The idempotency key: a second submit with the same key, owner and function returns the first job."""
    wanted_id: str = ""
    """The job's id if the caller chose it; with "" an id is generated."""
    traceparent: str = ""
    extra: Mapping[str, Any] | None = None
    """A JSON object that the handler reads from `context.extra`, such as the attributes of a CloudEvent."""
    source: Source = "job"
    """Its submitter: a caller, a queue or a batch."""
    max_queued: int | None = None
    """The job is refused if the function's queue has this many jobs already. None: no limit."""
    max_queued_bytes: int | None = None
    """The job is refused if the inputs in the function's queue would exceed this size. None: no limit."""
    large_input: str = ""
    """The name of the blob with the input. The store sets it if the input is large; see large_bodies.py."""

    @classmethod
    def for_function(cls, settings: FunctionSettings, body: bytes, **fields: Any) -> NewJob:
        """Return a job with the function's configured limits. `fields` sets and overrides fields."""
        limits = {"execution_timeout_s": settings.timeout_s, "ttl_s": settings.ttl_s}
        queue = {"max_queued": settings.max_jobs, "max_queued_bytes": MAX_QUEUED_BYTES}
        configured: dict[str, Any] = {**limits, **queue, "max_attempts": settings.attempts}
        return cls(settings.name, body, **configured | fields)

    def queued(self, job_id: str, now_s: float) -> Job:
        """Return the job that a submit at `now_s` puts in the queue."""
        shared = {name: getattr(self, name) for name in SHARED_FIELDS}
        return Job(job_id, state=JobState.IN_QUEUE, created_s=now_s, extra=self.extra or None, **shared)


@dataclass(frozen=True, slots=True)
class Job:
    """A stored job. Except the timeout and ttl, its times are Unix timestamps, which are 0 while unknown."""

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
    """How many attempts have started. While one runs, this number is its fence; see job_store.py."""
    retries: int = 0
    """How many times a caller has requested a retry."""
    started_s: float = 0.0
    ended_s: float = 0.0
    due_s: float = 0.0
    """The earliest start of a queued job; 0 if it may start now."""
    worker: str = ""
    output: bytes | None = None
    output_type: str = ""
    """The media type of the output; "" means JSON."""
    error: Mapping[str, Any] | None = None
    """The result of `PilotflameError.to_wire()`."""
    progress: bytes | None = None
    """The handler's latest progress report, as JSON."""
    metrics: bytes | None = None
    """The metrics that the handler has reported in the attempt that ended the job, as a JSON object."""
    logs: str = ""
    """The last log lines of an ended job."""
    pieces: int = 0
    """How many pieces of a streamed output are stored."""
    webhook: Webhook | None = None
    traceparent: str = ""
    extra: Mapping[str, Any] | None = None
    source: Source = "job"
    """Its submitter: a caller, a queue or a batch."""
    expires_s: float = 0.0
    """When the job and its result are deleted; 0 until the job is final."""
    large_input: str = ""
    large_output: str = ""
    """The names of the blobs with a large input and output, until the store has read them; see large_bodies.py."""

    def bare(self) -> Job:
        """Return the job without its input and output, to keep it for long."""
        return dataclasses.replace(self, input=b"", output=None, large_input="", large_output="")

    def status(self, now_s: float) -> dict[str, Any]:
        """Return the job's status in RunPod's form, which webhooks have too. Only orjson can serialise it."""
        fields = {"id": self.id, "status": str(self.state), "function": self.function} | self.shown_output()
        if self.error is not None:
            fields["error"] = dict(self.error)
        if self.pieces:
            fields["pieces"] = self.pieces
        delay_ms, execution_ms = self.durations_ms(now_s)
        return fields | {"delayTime": delay_ms, "executionTime": execution_ms, "workerId": self.worker}

    def durations_ms(self, now_s: float) -> tuple[int, int]:
        """Return how long the job has waited for a worker, and how long its latest attempt has run."""
        waited_s = (self.started_s or self.ended_s or now_s) - self.created_s
        ran_s = (self.ended_s or now_s) - self.started_s if self.started_s else 0.0
        return max(0, round(waited_s * 1000)), max(0, round(ran_s * 1000))

    def shown_output(self) -> dict[str, Any]:
        """Return the fields of a status with the output, or with the progress while the job runs. Only orjson can serialise them."""
        if self.state is JobState.IN_PROGRESS and self.progress:
            return {"output": orjson.Fragment(self.progress)}
        if not self.output:
            return {}
        if self.output_type:
            return {"output": base64.b64encode(self.output).decode(), "output_type": self.output_type}
        return {"output": orjson.Fragment(self.output)}


ENVELOPE: Mapping[str, Any] = {"bare": False}
"""The `extra` of a job whose input may have the form `{"input": …}`, like the body of a call. The input of other jobs is the event itself."""
SHARED_FIELDS = (
    "function", "input", "owner", "priority", "content_type", "execution_timeout_s", "ttl_s", "max_attempts", "webhook",
    "traceparent", "source",
)  # fmt: skip
"""The fields of a NewJob that its Job has too, besides `extra`."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The result of an attempt that ends its job: the job's final state and its output or error."""

    state: JobState
    output: bytes | None = None
    output_type: str = ""
    error: Mapping[str, Any] | None = None
    logs: str = ""
    metrics: bytes | None = None
    large_output: str = ""
    """The name of the blob with the output. The store sets it if the output is large; see large_bodies.py."""

    @property
    def size_bytes(self) -> int:
        return len(self.output or b"") + len(self.logs.encode()) + len(self.metrics or b"")


@dataclass(frozen=True, slots=True)
class JobCounts:
    """The number of a function's jobs in each state. The counts of final states include deleted jobs."""

    in_queue: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    """Includes jobs that timed out."""
    cancelled: int = 0
    retried: int = 0
    """How many retries were requested."""
    queued_bytes: int = 0
    """The total size of the inputs in the queue."""


def new_job_id(now_s: float) -> str:
    """Return an id that consists of the time and 80 random bits. Ids sort by time, so the index of ids grows at its
    end.
    """
    time_ms = max(0, int(now_s * 1000)) % (1 << 48)
    return f"{ID_PREFIX}{time_ms:012x}{_RANDOM.next()}"


def idempotency_digest(function: str, owner: str, key: str) -> bytes | None:
    """Return the digest under which an idempotency key is stored, or None if `key` is empty."""
    return _digest(16, function, owner, key) if key else None


def tombstone_key(function: str, job_id: str) -> int:
    """Return the 64-bit digest of function and id that the tombstone of a deleted job stores."""
    return int.from_bytes(_digest(8, function, job_id), "big", signed=True)


def _digest(size: int, *parts: str) -> bytes:
    # The length before each part makes the text unambiguous. Header values may contain surrogates.
    encoded = [part.encode("utf-8", "surrogatepass") for part in parts]
    whole = b"".join(b"%d:%s" % (len(part), part) for part in encoded)
    return hashlib.blake2b(whole, digest_size=size).digest()

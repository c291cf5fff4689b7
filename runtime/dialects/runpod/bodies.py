"""The bodies of RunPod's queue API: what a caller submits and what they are shown."""

# ruff: noqa: N815

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, NotRequired

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, with_config
from typing_extensions import TypedDict

from ....errors import BadInput, InputInvalid
from ...api.requests import load_json, validate
from ...api.responses import ErrorFields, Timestamp, timestamp
from ...jobs import message
from ...jobs.job import BATCH_PRIORITY, LOW_PRIORITY, Job, JobState, Webhook

MAX_LISTED = 1000
_PRIORITIES = {"normal": 0, "low": LOW_PRIORITY, "batch": BATCH_PRIORITY}


class JobPolicy(BaseModel):
    """How a job is treated; times in milliseconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    executionTimeout: int | None = Field(None, ge=1, le=7 * 86_400_000)
    ttl: int | None = Field(None, ge=1, le=365 * 86_400_000)
    lowPriority: bool = False
    priority: Literal["normal", "low", "batch"] | None = None


class JobRequest(BaseModel):
    """A job as it is submitted. Unknown keys are ignored, as RunPod does."""

    model_config = ConfigDict(frozen=True, extra="ignore", title="JobOrder")

    input: Any
    webhook: str | None = Field(None, max_length=2048)
    webhook_events: tuple[Literal["start", "output", "logs", "completed"], ...] = ("completed",)
    policy: JobPolicy = JobPolicy()

    def fields(self) -> dict[str, Any]:
        """Return the fields of NewJob that differ from the function's settings."""
        policy = self.policy
        priority = _PRIORITIES[policy.priority] if policy.priority else int(policy.lowPriority)
        fields: dict[str, Any] = {"priority": priority}
        if policy.executionTimeout is not None:
            fields["execution_timeout_s"] = policy.executionTimeout / 1000
        if policy.ttl is not None:
            fields["ttl_s"] = policy.ttl / 1000
        if self.webhook:
            fields["webhook"] = Webhook(self.webhook, self.webhook_events)
        return fields


def parse(body: bytes) -> JobRequest:
    """Raises BadInput if the body is not a JSON object with an input, InputInvalid if another field is invalid."""
    found, remedy = load_json(body), 'Send {"input": …}.'
    if not isinstance(found, dict) or "input" not in found:
        raise BadInput("The body has no input.", remedy=remedy)
    return validate(JobRequest, found, remedy, InputInvalid)


@with_config(title="Job")
class JobStatus(TypedDict):
    """A job. How its handler failed is data, with status 200."""

    id: str
    status: JobState
    function: str
    output: NotRequired[Annotated[Any, Field(description="While the job runs, its progress.")]]
    output_type: NotRequired[
        Annotated[str, Field(description="Of an output that is not JSON, which is Base64.")]
    ]
    error: NotRequired[str]
    errorDetails: NotRequired[ErrorFields]
    pieces: NotRequired[NonNegativeInt]
    delayTime: NonNegativeInt
    executionTime: NonNegativeInt
    workerId: str
    attempts: NonNegativeInt
    retries: NonNegativeInt
    createdAt: Timestamp
    logs: NotRequired[str]


class JobPiece(TypedDict):
    """A piece of a streamed output."""

    output: Any
    number: PositiveInt


JOBS = {"requests": Annotated[list[JobStatus], Field(max_length=MAX_LISTED)]}
PIECES = {"id": str, "status": JobState, "stream": list[JobPiece]}
PURGED = {"removed": NonNegativeInt, "status": Literal["completed"]}
HEALTH = {
    "jobs": dict.fromkeys(
        ("completed", "failed", "inProgress", "inQueue", "retried", "cancelled"), NonNegativeInt
    ),
    "workers": dict.fromkeys(
        ("idle", "running", "initializing", "ready", "throttled", "unhealthy", "draining"), NonNegativeInt
    ),
}


def shown(job: Job) -> dict[str, Any]:
    """Return a JobStatus for orjson. `error` is text, as RunPod's clients expect; `errorDetails` is all of it."""
    found = message.status(job, time.time()) | {
        "attempts": job.attempts,
        "retries": job.retries,
        "createdAt": timestamp(job.created_s),
    }
    if job.logs:
        found["logs"] = job.logs
    if job.error is not None:
        found["error"], found["errorDetails"] = str(job.error.get("message", "")), dict(job.error)
    return found

"""Defines Cog's predictions: the requests for them, and how a job is shown as a prediction."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

import orjson
from pydantic import BaseModel, Field, NonNegativeFloat
from typing_extensions import TypedDict

from ....errors import InputInvalid
from ...api.responses import Timestamp
from ...jobs.job import EVENTS, Job, JobState, Webhook

MAX_WAIT_S = 300.0
# The ids that a caller may choose. They must not begin like generated ids.
ID = re.compile(r"(?!job-)[A-Za-z0-9._~-]{1,128}")
WebhookEvent = Literal["start", "output", "logs", "completed"]
PredictionState = Literal["starting", "processing", "succeeded", "failed", "canceled"]
STATUSES: dict[JobState, PredictionState] = {
    JobState.IN_QUEUE: "starting",
    JobState.IN_PROGRESS: "processing",
    JobState.COMPLETED: "succeeded",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "failed",
    JobState.CANCELLED: "canceled",
}
_NULL = orjson.Fragment(b"null")
_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,6})\"?")


class PredictionRequest(BaseModel, frozen=True, extra="ignore", strict=True):
    """A new prediction. Unknown keys are ignored, as Cog does."""

    input: Any = Field(default_factory=dict)
    id: str | None = Field(None, max_length=1024)
    version: str | None = Field(None, max_length=256)
    webhook: str | None = Field(None, max_length=2048)
    webhook_events_filter: list[WebhookEvent] | None = Field(None, max_length=100)

    def fields(self, path_id: str | None, owner: str) -> dict[str, Any]:
        """Return the fields of NewJob that this request sets. The path may choose the id, too.

        Raises InputInvalid if the id is malformed, or if path and body differ.
        """
        if path_id is not None and self.id not in (None, path_id):
            raise InputInvalid("The id in the body is not the one in the path.", remedy="Send one of them.")
        wanted = path_id or self.id or ""
        if wanted and not ID.fullmatch(wanted):
            remedy = "Use 1 to 128 of A-Z a-z 0-9 . _ ~ and -, and do not begin with job-."
            raise InputInvalid(f"{wanted[:128]!r} cannot be a prediction's id.", remedy=remedy)
        fields: dict[str, Any] = {"wanted_id": stored_id(wanted, owner)}
        if wanted:
            fields["idempotency"] = f"prediction:{wanted}"
        if self.webhook:
            fields["webhook"] = Webhook(self.webhook, tuple(self.webhook_events_filter or EVENTS))
        return fields


class PredictionMetrics(TypedDict):
    predict_time: NotRequired[NonNegativeFloat]


class Prediction(TypedDict):
    """A prediction as these routes show it."""

    id: str
    version: str
    status: PredictionState
    input: Any
    output: Any
    error: str | None
    logs: str
    metrics: PredictionMetrics
    created_at: Timestamp | None
    started_at: Timestamp | None
    completed_at: Timestamp | None
    webhook: str | None


def preferred_wait(headers: Iterable[str]) -> float | None:
    """Parse all lines of Prefer (RFC 7240). Return the seconds to wait for the job's end; None: no limit."""
    parts = [part.split(";")[0].strip().lower() for line in headers for part in line.split(",")]
    waits = [float(found[1]) for part in parts if (found := _WAIT.fullmatch(part)) is not None]
    if waits:
        return min(waits[0], MAX_WAIT_S)
    return 0.0 if "respond-async" in parts else None


def stored_id(wanted: str, owner: str) -> str:
    """Return the id with the owner's. Otherwise JobConflict would reveal which ids other callers chose."""
    return f"{wanted}~{owner}" if wanted and owner else wanted


def chosen_id(job: Job) -> str:
    """Return the job's id without the owner, which `stored_id` adds."""
    return job.id.removesuffix(f"~{job.owner}") if job.owner else job.id


def shown(job: Job, pieces: Iterable[bytes] = ()) -> Prediction:
    """Return a job as a prediction, to be written by orjson.

    `pieces` are those of a streaming handler so far: the output while the job runs.
    """
    took_s, so_far = job.ended_s - job.started_s, b",".join(pieces)
    output = job.status(job.ended_s or job.created_s).get("output", _NULL)
    return {
        "id": chosen_id(job),
        "version": job.function,
        "status": STATUSES[job.state],
        # The input of a job that was submitted by another route is not shown if it is not JSON.
        "input": orjson.Fragment(job.input) if job.input and not job.content_type else _NULL,
        "output": orjson.Fragment(b"[" + so_far + b"]") if so_far and not job.state.final else output,
        "error": str(job.error.get("message", "")) if job.error is not None and job.state.final else None,
        "logs": job.logs,
        "metrics": {"predict_time": max(0.0, took_s)} if job.ended_s and job.started_s else {},
        "created_at": _date(job.created_s),
        "started_at": _date(job.started_s),
        "completed_at": _date(job.ended_s),
        "webhook": job.webhook.url if job.webhook is not None else None,
    }


def _date(at_s: float) -> Timestamp | None:
    return datetime.fromtimestamp(at_s, UTC).isoformat() if at_s else None

"""Predictions: jobs as Cog describes them, with what a caller sends and prefers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, NotRequired

import orjson
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError
from typing_extensions import TypedDict

from ....errors import BadInput, InputInvalid
from ...api.requests import problems
from ...api.responses import Timestamp
from ...jobs.job import EVENTS, Job, JobState

MAX_WAIT_S = 300.0
MAX_PROBLEMS = 20
# An id that a caller chooses must not look like a generated one.
ID = re.compile(r"(?!job-)[A-Za-z0-9._~-]{1,128}")
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


class PredictionRequest(BaseModel):
    """A new prediction. Unknown keys are ignored, as Cog does."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    input: Any = Field(default_factory=dict)
    id: str | None = Field(None, max_length=1024)
    version: str | None = Field(None, max_length=256)
    webhook: str | None = Field(None, max_length=2048)
    webhook_events_filter: list[Literal["start", "output", "logs", "completed"]] | None = Field(
        None, max_length=100
    )

    @property
    def events(self) -> tuple[str, ...]:
        """The events that the webhook is sent: all unless the filter names fewer."""
        return tuple(self.webhook_events_filter or EVENTS)


def parse(body: bytes) -> PredictionRequest:
    """Raises BadInput if the body is not JSON, InputInvalid if a field is invalid."""
    try:
        return PredictionRequest.model_validate_json(body or b"{}")
    except ValidationError as error:
        found = [{"field": field, "problem": problem} for field, problem in problems(error)[:MAX_PROBLEMS]]
        first = found[0]
        if error.errors()[0]["type"] == "json_invalid":
            raise BadInput(
                f"The body is not JSON: {first['problem']}.", remedy='Send {"input": …}.'
            ) from None
        raise InputInvalid(
            f"The prediction is invalid: {first['field']}: {first['problem']}.",
            remedy='Send for example {"input": {"text": "hello"}}.',
            details={"problems": found},
        ) from None


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


@dataclass(frozen=True, slots=True)
class Preference:
    """The header Prefer: `wait_s` 0 means not to wait, None to wait until the prediction ends."""

    wait_s: float | None = None

    @classmethod
    def of(cls, headers: Iterable[str]) -> Preference:
        """Combine all lines of the header (RFC 7240); unknown preferences are ignored."""
        parts = [part.split(";")[0].strip().lower() for line in headers for part in line.split(",")]
        waits = [float(found[1]) for part in parts if (found := _WAIT.fullmatch(part)) is not None]
        if waits:
            return cls(min(waits[0], MAX_WAIT_S))
        return cls(0.0 if "respond-async" in parts else None)


def stored_id(wanted: str, owner: str) -> str:
    """Return the id under which a job is stored whose caller chose `wanted`.

    It includes the owner, so that a refusal does not reveal which ids others chose.
    """
    return f"{wanted}~{owner}" if wanted and owner else wanted


def chosen_id(job: Job) -> str:
    """Return the id as its caller knows it."""
    return job.id.removesuffix(f"~{job.owner}") if job.owner else job.id


def shown(job: Job, pieces: Iterable[bytes] = ()) -> Prediction:
    """Return the prediction for orjson. `pieces` are those of a streamed output that has not ended."""
    took_s = job.ended_s - job.started_s
    return {
        "id": chosen_id(job),
        "version": job.function,
        "status": STATUSES[job.state],
        # The bodies of other routes may have other types.
        "input": orjson.Fragment(job.input) if job.input and not job.content_type else _NULL,
        "output": _output(job, pieces),
        "error": str(job.error.get("message", "")) if job.error is not None and job.state.final else None,
        "logs": job.logs,
        "metrics": {"predict_time": max(0.0, took_s)} if job.ended_s and job.started_s else {},
        "created_at": _date(job.created_s),
        "started_at": _date(job.started_s),
        "completed_at": _date(job.ended_s),
        "webhook": job.webhook.url if job.webhook is not None else None,
    }


def _output(job: Job, pieces: Iterable[bytes]) -> Any:
    if not job.state.final and (found := b",".join(pieces)):
        return orjson.Fragment(b"[" + found + b"]")
    return job.status(job.ended_s or job.created_s).get("output", _NULL)


def _date(at_s: float) -> Timestamp | None:
    return datetime.fromtimestamp(at_s, UTC).isoformat() if at_s else None

"""Describes a job as a prediction of Cog and Replicate, in responses and in webhooks."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import orjson

from ...jobs.stored.job import Job, JobState

PredictionState = Literal["starting", "processing", "succeeded", "failed", "canceled"]
STATUSES: dict[JobState, PredictionState] = {
    JobState.IN_QUEUE: "starting",
    JobState.IN_PROGRESS: "processing",
    JobState.COMPLETED: "succeeded",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "failed",
    JobState.CANCELLED: "canceled",
}
FORM = "prediction"
"""The form of webhooks of predictions, and the key under which `context.extra` has a request's fields except its input."""
MAX_SHOWN_PIECES = 1000
"""The maximum number of pieces in the output of a job that is still streaming."""
_NULL = orjson.Fragment(b"null")


def stored_id(wanted: str, owner: str) -> str:
    """Return the id with the owner's id appended. Otherwise JobConflict would reveal the ids of other callers' jobs."""
    return f"{wanted}~{owner}" if wanted and owner else wanted


def chosen_id(job: Job) -> str:
    """Return the job's id without the owner, which `stored_id` adds."""
    return job.id.removesuffix(f"~{job.owner}") if job.owner else job.id


def prediction_of(job: Job, pieces: Iterable[bytes] = ()) -> dict[str, Any]:
    """Return a job as a prediction, to be written by orjson.

    `pieces` are the pieces that a streaming handler has yielded so far. While the job runs, its output is these pieces.
    """
    so_far = b",".join(pieces)
    return {
        "id": chosen_id(job),
        "version": job.function,
        "status": STATUSES[job.state],
        # Another route may have submitted a job whose input is not JSON. Such an input is not shown.
        "input": orjson.Fragment(job.input) if job.input and not job.content_type else _NULL,
        "output": orjson.Fragment(b"[" + so_far + b"]") if so_far and not job.state.final else _output(job),
        "error": str(job.error.get("message", "")) if job.error is not None and job.state.final else None,
        "logs": job.logs,
        "metrics": _metrics(job),
        "created_at": _date(job.created_s),
        "started_at": _date(job.started_s),
        "completed_at": _date(job.ended_s),
        "webhook": job.webhook.url if job.webhook is not None else None,
    }


def webhook_body(job: Job, pieces: Sequence[bytes]) -> bytes:
    """Return the body of a webhook. As in Cog, it is the current prediction for each kind of event."""
    return orjson.dumps(prediction_of(job, pieces))


def _output(job: Job) -> Any:
    """Return the output. As in Cog, bytes are returned as text. Bytes that are not UTF-8 are returned as a data URL."""
    if not job.output_type or not job.output:
        return job.shown_output().get("output", _NULL)
    try:
        return job.output.decode()
    except UnicodeDecodeError:
        return f"data:{job.output_type};base64,{base64.b64encode(job.output).decode()}"


def _metrics(job: Job) -> dict[str, Any]:
    """Return the metrics that the predictor has recorded, and the durations."""
    recorded = orjson.loads(job.metrics) if job.metrics else {}
    if not job.ended_s or not job.started_s:
        return recorded
    times = {"predict_time": job.ended_s - job.started_s, "total_time": job.ended_s - job.created_s}
    return recorded | {name: max(0.0, seconds) for name, seconds in times.items()}


def _date(at_s: float) -> str | None:
    return datetime.fromtimestamp(at_s, UTC).isoformat() if at_s else None

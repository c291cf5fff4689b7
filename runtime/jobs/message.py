"""A job as JSON: in status responses and in webhook messages."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import orjson

from .job import Job, JobState


def body(job: Job, event: str, now_s: float) -> bytes:
    """Return an event's message after Standard Webhooks: `type`, `timestamp`, and `data`, the job's status.

    The fields of `data` are repeated at the top, with `error` as text, for receivers written for RunPod.
    """
    data = status(job, now_s)
    if job.logs and event in ("logs", "completed"):
        data["logs"] = job.logs
    top = data | {"error": str(job.error.get("message", ""))} if job.error is not None else data
    timestamp = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return orjson.dumps({"type": f"job.{event}", "timestamp": timestamp, "data": data} | top)


def status(job: Job, now_s: float) -> dict[str, Any]:
    """Return the job's status for orjson. Times are in milliseconds."""
    fields: dict[str, Any] = {"id": job.id, "status": str(job.state), "function": job.function}
    fields |= _output(job)
    if job.error is not None:
        fields["error"] = dict(job.error)
    if job.pieces:
        fields["pieces"] = job.pieces
    begun_s = job.started_s or job.ended_s or now_s
    fields["delayTime"] = _ms(begun_s - job.created_s)
    fields["executionTime"] = _ms((job.ended_s or now_s) - job.started_s) if job.started_s else 0
    fields["workerId"] = job.worker
    return fields


def _output(job: Job) -> dict[str, Any]:
    """Return the output, or the progress of a running job. Output that is not JSON becomes base64."""
    if job.state is JobState.IN_PROGRESS and job.progress:
        return {"output": orjson.Fragment(job.progress)}
    if not job.output:
        return {}
    if job.output_type:
        return {"output": base64.b64encode(job.output).decode(), "output_type": job.output_type}
    return {"output": orjson.Fragment(job.output)}


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))

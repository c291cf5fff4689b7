"""What a webhook says: the job as it stood when the event happened."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import orjson

from .job import Job, JobState


def body(job: Job, event: str, now_s: float) -> bytes:
    """The JSON of one event: after Standard Webhooks `type`, `timestamp` and `data`, with the job's fields at the top too.

    Those are for receivers written for RunPod, who read `id`, `status` and `output` there, and `error` as text.
    """
    data = status(job, now_s)
    if job.logs and event in ("logs", "completed"):
        data["logs"] = job.logs
    top = data | {"error": str(job.error.get("message", ""))} if job.error is not None else data
    moment = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return orjson.dumps({"type": f"job.{event}", "timestamp": moment, "data": data} | top)


def status(job: Job, now_s: float) -> dict[str, Any]:
    """The job as its status route shows it, for orjson; times in milliseconds."""
    found: dict[str, Any] = {"id": job.id, "status": str(job.state), "function": job.function}
    found |= _output(job)
    if job.error is not None:
        found["error"] = dict(job.error)
    if job.pieces:
        found["pieces"] = job.pieces
    begun_s = job.started_s or job.ended_s or now_s
    found["delayTime"] = _ms(begun_s - job.created_s)
    found["executionTime"] = _ms((job.ended_s or now_s) - job.started_s) if job.started_s else 0
    found["workerId"] = job.worker
    return found


def _output(job: Job) -> dict[str, Any]:
    """The answer; while the job runs, how far it is. Bytes that are not JSON are base64, with their type."""
    if job.state is JobState.IN_PROGRESS and job.progress:
        return {"output": orjson.Fragment(job.progress)}
    if not job.output:
        return {}
    if job.output_type:
        return {"output": base64.b64encode(job.output).decode(), "output_type": job.output_type}
    return {"output": orjson.Fragment(job.output)}


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))

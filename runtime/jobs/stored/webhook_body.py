"""Makes the bodies of webhooks about jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeAlias

import orjson

from .job import Job

WebhookBodies: TypeAlias = Mapping[str, Callable[[Job, Sequence[bytes]], bytes]]
"""By `Webhook.form`: a function that makes a body from the job and, while it streams, the first pieces of its output."""


def message(job: Job, event: str, now_s: float) -> bytes:
    """Return the body of an event as Standard Webhooks defines it, with the job's status as `data`.

    The status is repeated at the top level, where `error` is only a text, for receivers written for RunPod. If the output is
    too large for a message, `output_url` is the path of the job.
    """
    link = {"output_url": f"/v1/functions/{job.function}/jobs/{job.id}"} if job.large_output else {}
    data = job.status(now_s) | link
    if job.logs and event in ("logs", "completed"):
        data["logs"] = job.logs
    top = data | {"error": str(job.error.get("message", ""))} if job.error is not None else data
    timestamp = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return orjson.dumps({"type": f"job.{event}", "timestamp": timestamp, "data": data} | top)

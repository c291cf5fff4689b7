"""The backend: the functions, jobs, metrics and limits that every API of the gateway works with."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from typing_extensions import TypedDict

from ...errors import PilotflameError
from ..functions.live import Live
from ..functions.registry import Functions
from ..jobs.job import Job, JobState, NewJob
from ..jobs.jobs import Jobs
from ..serving.invocation import Invocation
from ..serving.revision import Revision
from ..telemetry.metrics import Metrics
from .requests import MAX_KEY_CHARS, caller_of, idempotency_of, read_body, traceparent_of
from .routes import Parameter, header

ASYNC_BODY_BYTES = 10 << 20
"""The limit of a body that is stored and run later."""
_SAME = "The same key with the same body is the same job."
_KEY = header("Idempotency-Key", _SAME, type="string", maxLength=MAX_KEY_CHARS)
SUBMIT_PARAMETERS: tuple[Parameter, ...] = (_KEY, header("traceparent"))
REPLAYED = {"Idempotent-Replayed": "true"}
"""The header of a response whose job existed before."""
REPLAYED_HEADER = {"Idempotent-Replayed": {"schema": {"type": "string", "const": "true"}}}


class Accepted(TypedDict):
    """A job that is stored."""

    id: str
    status: JobState


@dataclass(frozen=True, slots=True)
class Backend:
    """What each API and each dialect is constructed with."""

    functions: Functions
    jobs: Jobs
    metrics: Metrics
    max_body_bytes: int
    body_timeout_s: float

    def body_limit(self, revision: Revision) -> int:
        """Return how many bytes a body for this revision may have."""
        return min(self.max_body_bytes, revision.policy.max_body_bytes)

    async def read_body(
        self, request: web.Request, function: str, limit: int | None = None
    ) -> tuple[Live, bytes]:
        """Return the body and the function as it is afterwards: it may be deployed anew, or deleted, meanwhile."""
        most = self.body_limit(self.functions.get(function).revision)
        body = await read_body(request, most if limit is None else min(most, limit), self.body_timeout_s)
        return self.functions.get(function), body

    async def submit(
        self, request: web.Request, live: Live, body: bytes, **fields: Any
    ) -> tuple[Job, dict[str, str]]:
        """Store a job; return it and the headers of its response, which say if it existed. `fields` are NewJob's."""
        job, replayed = await self.jobs.submit(new_job(request, live, body, **fields))
        return job, dict(REPLAYED) if replayed else {}

    def record(
        self, name: str, status: int, invocation: Invocation, error: PilotflameError | None = None
    ) -> None:
        """Count an invocation whose response is about to be sent."""
        invocation.timeline.mark_responded(time.monotonic())
        self.metrics.responded(name, status, invocation.timeline, error)
        if invocation.timeline.cold:
            self.functions.note_cold(name, invocation.timeline)


def new_job(request: web.Request, live: Live, body: bytes, **fields: Any) -> NewJob:
    """Return a job of a live function: its settings, what the request's headers say, and `fields` over both."""
    fields.setdefault("owner", caller_of(request).owner)
    fields.setdefault("traceparent", traceparent_of(request.headers))
    if "idempotency" not in fields:
        fields["idempotency"] = idempotency_of(request.headers)
    return NewJob.for_function(live.record.settings, body, **fields)

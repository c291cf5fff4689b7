"""Serves the jobs of functions, below `/v1/functions/{function}/jobs`. Plugins serve the same jobs in the forms of other platforms."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from aiohttp import web
from pydantic import BaseModel, Field, NonNegativeInt, with_config
from typing_extensions import TypedDict

from ....errors import InputInvalid
from ...ground.access.keys import Scope
from ...ground.telemetry.invocation_end import Source
from ...jobs.stored.job import BATCH_PRIORITY, ENVELOPE, LOW_PRIORITY, Job, JobCounts, JobState, Webhook
from ...node.functions.live import Live
from ..http.event_stream import EVENTS
from ..http.parsed_bodies import parsed
from ..http.requests import Headers, dump_json, load_json, owner_of, validate
from ..http.responses import (
    ErrorFields,
    Handler,
    Timestamp,
    json_response,
    json_with_large,
    outputs_response,
    timestamp,
)
from ..http.routes import Choices, Number, Parameter, Route, header
from ..http.sliced_body import SLICE_BYTES
from .backend import (
    ASYNC_BODY_BYTES,
    LOCATION_HEADER,
    REPLAYED_HEADER,
    SUBMIT_PARAMETERS,
    Backend,
    Submitted,
    job_path,
)
from .job_events import job_encoder, send_job

MAX_LISTED = 1000
MAX_WAIT_S = 300
WAIT_S = Number("wait_s", "Seconds to wait for the job's end.", 0, maximum=MAX_WAIT_S)
STATUS = Choices("status", "Only jobs in these states.", JobState)
LIMIT = Number("limit", f"The largest number of jobs, {MAX_LISTED} at most.", 100)
BEFORE = Parameter("before", "A job's id: only older ones.")
LISTING: tuple[Parameter, ...] = (STATUS, LIMIT, BEFORE)
SUBMIT_ERRORS = (400, 404, 408, 409, 413, 422, 503)
JOB_ERRORS = (404, 410, 503)
REMEDY = 'Send {"input": …}. /openapi.json lists the other fields.'
Priority: TypeAlias = Literal["normal", "low", "batch"]
_PRIORITIES: dict[Priority, int] = {"normal": 0, "low": LOW_PRIORITY, "batch": BATCH_PRIORITY}
ReadJobBody: TypeAlias = Callable[[Live, bytes], tuple[bytes, dict[str, Any]]]
"""Returns the input of a job, and the fields of NewJob that the body of its request sets."""


class JobOrder(BaseModel, frozen=True):
    """What the requests for jobs have in common."""

    input: Any
    webhook: str | None = Field(None, max_length=2048)
    webhook_events: tuple[Literal["start", "output", "logs", "completed"], ...] = ("completed",)

    def new_fields(self, priority: Priority, timeout_s: float | None, ttl_s: float | None) -> dict[str, Any]:
        """Return the fields of NewJob that the request sets. The other fields come from the function's settings."""
        source: Source = "batch" if priority == "batch" else "job"
        limits = {"execution_timeout_s": timeout_s, "ttl_s": ttl_s}
        fields: dict[str, Any] = {key: value for key, value in limits.items() if value is not None}
        if self.webhook:
            fields["webhook"] = Webhook(self.webhook, self.webhook_events)
        return {"priority": _PRIORITIES[priority], "source": source, **fields}


class JobRequest(JobOrder, frozen=True, extra="forbid"):
    """A job to submit."""

    priority: Priority = "normal"
    execution_timeout_s: float | None = Field(None, gt=0, le=7 * 86_400)
    ttl_s: float | None = Field(None, gt=0, le=365 * 86_400)


@with_config(title="Job")
class JobStatus(TypedDict):
    """A job. If its handler failed, the response still has status 200, and the job has `error`."""

    id: str
    function: str
    status: JobState
    output: NotRequired[Annotated[Any, Field(description="While the job runs, its progress.")]]
    output_type: NotRequired[
        Annotated[str, Field(description="Media type of a non-JSON output, sent in Base64.")]
    ]
    error: NotRequired[ErrorFields]
    pieces: NonNegativeInt
    delay_ms: NonNegativeInt
    execution_ms: NonNegativeInt
    worker: str
    attempts: NonNegativeInt
    retries: NonNegativeInt
    created_at: Timestamp
    logs: NotRequired[str]


JOBS = {"jobs": Annotated[list[JobStatus], Field(max_length=MAX_LISTED)], "counts": JobCounts}


class JobsApi:
    """The routes of jobs. A caller sees and changes only the jobs of their own key. An administrator sees and changes
    all jobs.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self._jobs = backend, backend.jobs

    def routes(self) -> list[Route]:
        def row(method: str, path: str, handler: Handler, summary: str, response: Any, **more: Any) -> Route:
            path, more = f"/v1/functions/{{function}}/jobs{path}", {"errors": JOB_ERRORS} | more
            return Route(method, path, handler, Scope.INVOKE, summary, response, **more)

        listing = {"parameters": LISTING, "errors": (400, *JOB_ERRORS)}
        waiting = {"parameters": (WAIT_S,), "errors": (400, *JOB_ERRORS)}
        submit = {
            "status": 202, "other_responses": {200: JobStatus}, "body": JobRequest, "errors": SUBMIT_ERRORS,
            "parameters": (WAIT_S, *SUBMIT_PARAMETERS), "headers": REPLAYED_HEADER | LOCATION_HEADER,
        }  # fmt: skip
        follow, resume = "Send what happens to a job as events.", {"parameters": (header("Last-Event-ID"),)}
        return [
            row("POST", "", self.submit, "Submit a job; 200 if it has ended.", JobStatus, **submit),
            row("GET", "", self.list, "List jobs, the newest first, and count all.", JOBS, **listing),
            row("POST", "/purge", self.purge, "Cancel all jobs that wait.", {"cancelled": NonNegativeInt}),
            row("GET", "/{job}", self.show, "Show a job.", JobStatus, **waiting),
            row("GET", "/{job}/events", self.events, follow, EVENTS, **resume),
            row("POST", "/{job}/cancel", self.cancel, "Cancel a job unless it has ended.", JobStatus),
            row("POST", "/{job}/retry", self.retry, "Queue a failed job again.", JobStatus, errors=(409, *JOB_ERRORS)),
        ]  # fmt: skip

    async def submit(self, request: web.Request) -> web.StreamResponse:
        """Store a job. With `wait_s`, respond when it has ended, or when the time is over."""
        job, headers = await submitted(self._backend, request, _read, WAIT_S.read(request) or None)
        headers["Location"] = job_path(job)
        return await job_response(request, job, status=200 if job.state.final else 202, headers=headers)

    async def list(self, request: web.Request) -> web.StreamResponse:
        found = await newest(self._backend, request)
        counts = await self._jobs.store.counts(request.match_info["function"], owner_of(request))
        return json_response({"jobs": [shown(job) for job in found], "counts": counts})

    async def purge(self, request: web.Request) -> web.StreamResponse:
        return json_response({"cancelled": await purged(self._backend, request)})

    async def show(self, request: web.Request) -> web.StreamResponse:
        if wait_s := WAIT_S.read(request):
            return await job_response(request, await waited(self._backend, request, wait_s))
        return await job_response(request, await self._jobs.store.get(*named(request)))

    async def events(self, request: web.Request) -> web.StreamResponse:
        job = await self._jobs.store.glance(*named(request))
        return await send_job(request, self._jobs, job, job_encoder(shown))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        return await job_response(request, await self._jobs.store.cancel(*named(request)))

    async def retry(self, request: web.Request) -> web.StreamResponse:
        return await job_response(request, await retried(self._backend, request))


def shown(job: Job) -> dict[str, Any]:
    """Return a job as a JobStatus that orjson can write."""
    delay_ms, execution_ms = job.durations_ms(time.time())
    found = {
        "id": job.id, "function": job.function, "status": job.state, **job.shown_output(), "pieces": job.pieces,
        "delay_ms": delay_ms, "execution_ms": execution_ms, "worker": job.worker, "attempts": job.attempts,
        "retries": job.retries, "created_at": timestamp(job.created_s),
    }  # fmt: skip
    if job.error is not None:
        found["error"] = dict(job.error)
    return found | ({"logs": job.logs} if job.logs else {})


# -- what the routes of plugins share


def named(request: web.Request) -> tuple[str, str, str]:
    """Return the function and the job that the path names, and the owner that the job must have."""
    return request.match_info["function"], request.match_info["job"], owner_of(request)


async def job_response(
    request: web.Request, job: Job, show: Callable[[Job], dict[str, Any]] = shown, *,
    status: int = 200, headers: Headers | None = None,
) -> web.Response:  # fmt: skip
    """Return a response with a job in the form that `show` returns. A large output in JSON is not copied."""
    size = len(job.output or b"")
    if job.output is None or job.output_type or size <= SLICE_BYTES:
        return await outputs_response(request, size, partial(show, job), status=status, headers=headers)
    return json_with_large(
        "output", job.output, show(replace(job, output=None)), status=status, headers=headers
    )


async def submitted(
    backend: Backend, request: web.Request, read: ReadJobBody, wait_s: float | None = None
) -> Submitted:
    """Store the job of a request, and wait up to `wait_s` for its end. Return the job, and headers for the response."""
    live, event, fields = await _asked(backend, request, read, ASYNC_BODY_BYTES if wait_s is None else None)
    job, replayed = await backend.submit(request, live, event, wait_s=wait_s, **fields)
    return job, replayed | {"X-Request-Id": job.id}


async def _asked(
    backend: Backend, request: web.Request, read: ReadJobBody, most: int | None
) -> tuple[Live, bytes, dict[str, Any]]:
    """Return the function, the input of the job, and the other fields of NewJob. This is a function of its own, so that
    the request's body and its parsed values are freed before `submitted` waits for the job's end.
    """
    live, body = await backend.read_body(request, request.match_info["function"], most)
    event, fields = await parsed(request, body, lambda body: read(live, body))
    return live, event, fields


async def waited(backend: Backend, request: web.Request, wait_s: float) -> Job:
    """Return the job that the request's path names, once it has ended or after `wait_s`."""
    job = await backend.jobs.store.glance(*named(request))
    return await backend.jobs.wait(job.function, job.id, wait_s)


async def newest(backend: Backend, request: web.Request) -> list[Job]:
    """Return the jobs that the parameters LISTING of a request select, the newest first."""
    function = backend.functions.get(request.match_info["function"]).record.function
    limit, before = min(max(1, LIMIT.read(request)), MAX_LISTED), request.query.get("before", "")
    return await backend.jobs.store.newest(function, STATUS.read(request), limit, before, owner_of(request))


async def retried(backend: Backend, request: web.Request) -> Job:
    """Queue the job that the request's path names again, and return it. Raise UnknownFunction if its function was deleted."""
    backend.functions.get(request.match_info["function"])
    return await backend.jobs.store.retry(*named(request))


async def purged(backend: Backend, request: web.Request) -> int:
    """Cancel the caller's waiting jobs of the function that the path names, and return their number."""
    function = backend.functions.get(request.match_info["function"]).record.function
    return await backend.jobs.purge(function, owner_of(request))


def _read(_live: Live, body: bytes) -> tuple[bytes, dict[str, Any]]:
    wanted = validate(JobRequest, load_json(body), REMEDY, InputInvalid)
    fields = wanted.new_fields(wanted.priority, wanted.execution_timeout_s, wanted.ttl_s)
    return dump_json(wanted.input), {**fields, "extra": ENVELOPE}

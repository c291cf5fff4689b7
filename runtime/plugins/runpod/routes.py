"""Serves the routes of RunPod's queue API. The response with a failed job has status 200 and is not an error."""

# ruff: noqa: N815

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NotRequired

import orjson
from aiohttp import web
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt
from typing_extensions import TypedDict

from ....errors import BadInput, InputInvalid
from ....handlers.codec import JSON_TYPE
from ...front.api.backend import REPLAYED_HEADER, SUBMIT_PARAMETERS, Accepted, Backend
from ...front.api.job_events import job_encoder, send_job
from ...front.api.jobs import (
    JOB_ERRORS,
    LISTING,
    MAX_LISTED,
    SUBMIT_ERRORS,
    JobOrder,
    Priority,
    ReadJobBody,
    job_response,
    named,
    newest,
    purged,
    retried,
    submitted,
    waited,
)
from ...front.api.plugin import ApiPlugin, list_response
from ...front.http.event_stream import EVENTS, accepts_events, last_event_id
from ...front.http.requests import Headers, dump_json, load_json, owner_of, validate
from ...front.http.responses import ErrorFields, Handler, Timestamp, json_response, timestamp
from ...front.http.routes import Number, Route, header
from ...ground.access.keys import Scope
from ...jobs.stored.job import Job, JobState
from ...jobs.stored.webhook_body import WebhookBodies
from ...node.functions.live import Live
from . import openai_jobs
from .polls import Polls

MIN_WAIT_MS, MAX_WAIT_MS = 1000, 300_000
PIECES_PER_POLL = 1000
WAIT = Number("wait", f"Milliseconds to wait for the end, {MAX_WAIT_MS} at most.", 90_000)
AFTER = Number("after", "The number of the last piece that was seen; by default, that of the last poll.")


class JobPolicy(BaseModel, frozen=True, extra="ignore"):
    """The limits and the priority of a job. Times are in milliseconds."""

    executionTimeout: int | None = Field(None, ge=1, le=7 * 86_400_000)
    ttl: int | None = Field(None, ge=1, le=365 * 86_400_000)
    lowPriority: bool = False
    priority: Priority | None = None


class RunPodRequest(JobOrder, frozen=True, extra="ignore"):
    """A request to submit a job. As at RunPod, unknown keys are ignored."""

    policy: JobPolicy = JobPolicy()

    def fields(self) -> dict[str, Any]:
        """Return the fields of NewJob that this request sets."""
        policy = self.policy
        priority: Priority = policy.priority or ("low" if policy.lowPriority else "normal")
        return self.new_fields(priority, _seconds(policy.executionTimeout), _seconds(policy.ttl))


class RunPodJob(TypedDict):
    """A job. If its handler failed, the response still has status 200, and the job has `error` and `errorDetails`."""

    id: str
    status: JobState
    function: str
    output: NotRequired[Annotated[Any, Field(description="While the job runs, its progress.")]]
    output_type: NotRequired[
        Annotated[str, Field(description="Media type of a non-JSON output, sent in Base64.")]
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


JOBS = {"requests": Annotated[list[RunPodJob], Field(max_length=MAX_LISTED)]}
PIECES = {"id": str, "status": JobState, "stream": list[JobPiece]}
PURGED = {"removed": NonNegativeInt, "status": Literal["completed"]}
_JOB_COUNTS = ("completed", "failed", "inProgress", "inQueue", "retried", "cancelled")
_WORKER_COUNTS = ("idle", "running", "initializing", "ready", "throttled", "unhealthy", "draining")
HEALTH = {
    "jobs": dict.fromkeys(_JOB_COUNTS, NonNegativeInt),
    "workers": dict.fromkeys(_WORKER_COUNTS, NonNegativeInt),
}


def shown(job: Job) -> dict[str, Any]:
    """Return a job as a RunPodJob that orjson can write."""
    counts = {"attempts": job.attempts, "retries": job.retries}
    found = job.status(time.time()) | counts | {"createdAt": timestamp(job.created_s)}
    if job.logs:
        found["logs"] = job.logs
    if job.error is not None:
        # RunPod's clients expect a string as `error`.
        found["error"], found["errorDetails"] = str(job.error.get("message", "")), dict(job.error)
    return found


def webhook_body(job: Job, _pieces: Sequence[bytes]) -> bytes:
    """Return the body of a webhook of a job with a request of OpenAI's API. It is the job, as at RunPod."""
    return orjson.dumps(shown(openai_jobs.in_form(job)))


async def _response(request: web.Request, job: Job, headers: Headers | None = None) -> web.Response:
    """Return a response with a job as a RunPodJob."""
    return await job_response(request, await openai_jobs.read_in_form(request, job), shown, headers=headers)


class QueueApi(ApiPlugin):
    """The routes of a function's jobs, below /v2/{function}."""

    webhook_bodies: ClassVar[WebhookBodies] = {openai_jobs.FORM: webhook_body}

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._backend = backend
        self._jobs = backend.jobs
        self._polls = Polls(backend.database)

    def routes(self) -> list[Route]:
        def row(method: str, path: str, handler: Handler, summary: str, response: Any, **more: Any) -> Route:
            path, more = f"/v2/{{function}}/{path}", {"errors": JOB_ERRORS} | more
            return Route(method, path, handler, Scope.INVOKE, summary, response, **more)

        submit = {"body": RunPodRequest, "errors": SUBMIT_ERRORS, "headers": REPLAYED_HEADER}
        timed = submit | {"parameters": (WAIT, *SUBMIT_PARAMETERS)}
        waiting = {"parameters": (WAIT,), "errors": (400, *JOB_ERRORS)}
        stream = {"parameters": (AFTER, header("Last-Event-ID")), "errors": (400, *JOB_ERRORS)}
        listing = {"parameters": LISTING, "errors": (400, *JOB_ERRORS)}
        retry = {"errors": (409, *JOB_ERRORS)}
        pieces, poll = {JSON_TYPE: PIECES, **EVENTS}, "Return pieces since the last poll, or all as events."
        return [
            row("POST", "run", self.run, "Submit a job.", Accepted, parameters=SUBMIT_PARAMETERS, **submit),
            row("POST", "runsync", self.runsync, "Submit a job and wait for its end.", RunPodJob, **timed),
            row("GET", "status/{job}", self.status, "Show a job.", RunPodJob),
            row("POST", "status/{job}", self.status, "Show a job.", RunPodJob),
            row("GET", "status-sync/{job}", self.status_sync, "Wait for a job's end.", RunPodJob, **waiting),
            row("GET", "stream/{job}", self.stream, poll, pieces, **stream),
            row("POST", "stream/{job}", self.stream, poll, pieces, **stream),
            row("POST", "cancel/{job}", self.cancel, "Cancel a job unless it has ended.", RunPodJob),
            row("POST", "retry/{job}", self.retry, "Queue a failed job again.", RunPodJob, **retry),
            row("POST", "purge-queue", self.purge, "Cancel all jobs that wait.", PURGED),
            row("GET", "health", self.health, "Count jobs and workers by state.", HEALTH),
            row("GET", "requests", self.requests, "List jobs, the newest first.", JOBS, **listing),
        ]

    async def run(self, request: web.Request) -> web.StreamResponse:
        job, headers = await submitted(self._backend, request, self._reads(request))
        return json_response(Accepted(id=job.id, status=job.state), headers=headers)

    async def runsync(self, request: web.Request) -> web.StreamResponse:
        """Submit a job. Respond with it when it has ended, or when the time in `?wait=` is over."""
        job, headers = await submitted(self._backend, request, self._reads(request), _wait_s(request))
        return await _response(request, job, headers)

    async def status(self, request: web.Request) -> web.StreamResponse:
        return await _response(request, await self._jobs.store.get(*named(request)))

    async def status_sync(self, request: web.Request) -> web.StreamResponse:
        """Respond with a job when it has ended, or when the time in `?wait=` is over."""
        return await _response(request, await waited(self._backend, request, _wait_s(request)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        return await _response(request, await self._jobs.store.cancel(*named(request)))

    async def retry(self, request: web.Request) -> web.StreamResponse:
        return await _response(request, await retried(self._backend, request))

    async def purge(self, request: web.Request) -> web.StreamResponse:
        return json_response({"removed": await purged(self._backend, request), "status": "completed"})

    async def health(self, request: web.Request) -> web.StreamResponse:
        live = self._backend.functions.get(request.match_info["function"])
        counts = await self._jobs.store.counts(live.record.function, owner_of(request))
        worker_counts = live.workers.worker_counts()
        running, failures = min(worker_counts.ready, worker_counts.in_flight), live.workers.breaker.failures
        health = {
            "jobs": {
                "completed": counts.completed, "failed": counts.failed, "inProgress": counts.in_progress,
                "inQueue": counts.in_queue, "retried": counts.retried, "cancelled": counts.cancelled,
            },
            "workers": {
                "idle": worker_counts.ready - running + worker_counts.parked, "running": running, "initializing": worker_counts.starting,
                "ready": worker_counts.ready, "throttled": _throttled(live, max(worker_counts.queued, counts.in_queue)),
                "unhealthy": 0 if worker_counts.ready else failures, "draining": worker_counts.draining,
            },
        }  # fmt: skip
        return json_response(health)

    async def requests(self, request: web.Request) -> web.StreamResponse:
        return json_response({"requests": [shown(job) for job in await newest(self._backend, request)]})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Return the pieces after `?after=`, or without it the pieces since the last poll, or send all as events."""
        if accepts_events(request):
            return await self._send(request, await self._jobs.store.glance(*named(request)))
        job = await self._jobs.store.get(*named(request))
        polls, poller = "after" not in request.query, (job.id, owner_of(request))
        after = await self._polls.last(poller) if polls else AFTER.read(request)
        known = self._polls.output(poller) if polls else None
        output = known if known is not None and known.precedes(job, after) else openai_jobs.output_of(job)
        pieces = await openai_jobs.pieces_of(request, self._jobs.store, job, output, after, PIECES_PER_POLL)
        last = max(pieces[-1][0] if pieces else 0, output.read if output is not None else 0)
        # If the job has ended, and the polls have returned all pieces, the next poll starts with the first piece again.
        if polls and job.state.final and last <= after:
            await self._polls.forget(poller)
        elif polls:
            await self._polls.note(poller, after, last, output)
        found = [b'{"output":%b,"number":%d}' % (piece, number) for number, piece in pieces]
        return await list_response(request, "stream", found, {"id": job.id, "status": job.state})

    async def _send(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Send a job's pieces as events, after the piece in `Last-Event-ID`."""
        if (output := openai_jobs.output_of(job)) is not None:
            await openai_jobs.read_until(request, self._jobs.store, job, output, last_event_id(request))
        encode = job_encoder(shown) if output is None else job_encoder(shown, output.numbered)
        return await send_job(request, self._jobs, job, encode, partial(openai_jobs.read_in_form, request))

    def _reads(self, request: web.Request) -> ReadJobBody:
        """Return the function that reads the body of a request for a job."""
        return lambda live, body: self._read(request, live, body)

    def _read(self, request: web.Request, live: Live, body: bytes) -> tuple[bytes, dict[str, Any]]:
        """Return the input of a job, and the fields of NewJob that its request sets."""
        found, remedy = load_json(body), 'Send {"input": …}.'
        if not isinstance(found, dict) or "input" not in found:
            raise BadInput("The body has no input.", remedy=remedy)
        wanted = validate(RunPodRequest, found, remedy, InputInvalid)
        event, fields = wanted.input, wanted.fields()
        if openai_jobs.is_openai(live, event):
            event, fields["extra"] = openai_jobs.event_of(self._backend, request, live, event)
            if (webhook := fields.get("webhook")) is not None:
                fields["webhook"] = replace(webhook, form=openai_jobs.FORM)
        return dump_json(event), fields


def _throttled(live: Live, queued: int) -> int:
    """Return the number of workers that the queue needs but cannot get.

    A limit of the node or failed starts keep such workers from starting.
    """
    workers = live.workers
    if workers.reached is None and not workers.breaker.failures:
        return 0
    worker_counts, scale = workers.worker_counts(), live.revision.policy.scale
    missing = scale.max - worker_counts.ready - worker_counts.parked - worker_counts.starting
    return max(0, min(math.ceil(queued / scale.concurrency) - worker_counts.starting, missing))


def _seconds(ms: int | None) -> float | None:
    return ms / 1000 if ms is not None else None


def _wait_s(request: web.Request) -> float:
    return min(max(WAIT.read(request), MIN_WAIT_MS), MAX_WAIT_MS) / 1000

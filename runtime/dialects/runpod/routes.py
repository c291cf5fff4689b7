"""The queue's routes, in RunPod's spelling: submit, wait, look, stream, cancel, retry, purge. None waits for a cold start.

A handler's failure is data here: 200 with `status: FAILED`. Only what could not be accepted is an error.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....errors import BadInput, InputInvalid, PilotflameError
from ....handlers.codec import JSON_TYPE
from ...access.caller import caller_of
from ...api.requests import (
    content_type_of,
    dump_json,
    idempotency_of,
    media_type_of,
    read_body,
    request_id_of,
    traceparent_of,
)
from ...api.responses import EVENT_STREAM_TYPE, HEARTBEAT_S, error_response, event, typed
from ...functions.live import Live
from ...functions.registry import Functions
from ...jobs import message
from ...jobs.job import BATCH_PRIORITY, LOW_PRIORITY, Job, JobState, NewJob, Webhook
from ...jobs.jobs import Jobs
from ...jobs.order import order
from ..cloudevents import parsing
from ..cloudevents import routes as events_api

ASYNC_BODY_BYTES = 10 << 20
WAIT_MS = 90_000
LEAST_WAIT_MS, MOST_WAIT_MS = 1000, 300_000
MAX_LISTED = 1000
MAX_POLLERS = 10_000
PIECES_A_POLL = 1000
_PRIORITIES = {"normal": 0, "low": LOW_PRIORITY, "batch": BATCH_PRIORITY}


class JobPolicy(BaseModel):
    """How a job is to be treated; milliseconds, as RunPod has them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    executionTimeout: int | None = Field(None, ge=1, le=7 * 86_400_000)  # noqa: N815  theirs
    ttl: int | None = Field(None, ge=1, le=365 * 86_400_000)
    lowPriority: bool = False  # noqa: N815
    priority: Literal["normal", "low", "batch"] | None = None


class JobRequest(BaseModel):
    """What is submitted. Keys that are not known are left alone, as RunPod's callers are used to."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    input: Any
    webhook: str | None = Field(None, max_length=2048)
    webhook_events: tuple[Literal["start", "output", "logs", "completed"], ...] = ("completed",)
    policy: JobPolicy = JobPolicy()


class QueueApi:
    """Routes of jobs below /v2/{function}."""

    def __init__(
        self, functions: Functions, jobs: Jobs, *, max_body_bytes: int, body_timeout_s: float
    ) -> None:
        self._functions = functions
        self._jobs = jobs
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._polled: OrderedDict[str, int] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        base = "/v2/{function}"
        return [
            web.post(f"{base}/run", typed(self.run)),
            web.post(f"{base}/runsync", typed(self.runsync)),
            web.get(f"{base}/status/{{job}}", typed(self.status)),
            web.post(f"{base}/status/{{job}}", typed(self.status)),
            web.get(f"{base}/stream/{{job}}", typed(self.stream)),
            web.post(f"{base}/stream/{{job}}", typed(self.stream)),
            web.post(f"{base}/cancel/{{job}}", typed(self.cancel)),
            web.post(f"{base}/retry/{{job}}", typed(self.retry)),
            web.post(f"{base}/purge-queue", typed(self.purge)),
            web.get(f"{base}/health", typed(self.health)),
            web.get(f"{base}/requests", typed(self.requests)),
        ]

    async def run(self, request: web.Request) -> web.StreamResponse:
        """An order, or CloudEvents."""
        live, body = await self._body(request, ASYNC_BODY_BYTES)
        if (events := parsing.parse(request.headers, body)) is not None:
            found = await events_api.submit(self._jobs, live, events, owner=caller_of(request).owner)
            return events_api.accepted(request, found)
        job, replayed = await self._submit(request, live, body)
        return _json({"id": job.id, "status": str(job.state)}, job, replayed)

    async def runsync(self, request: web.Request) -> web.StreamResponse:
        """The job as it is when it has ended, or when `?wait=` is over.

        By then RunPod's answers IN_PROGRESS, whether it runs or not; here one that still waits is IN_QUEUE. RunPod's
        clients poll on either.
        """
        wait_s = min(max(_number(request, "wait", WAIT_MS), LEAST_WAIT_MS), MOST_WAIT_MS) / 1000
        live, body = await self._body(request, self._max_body_bytes)
        job, replayed = await self._submit(request, live, body)
        job = await self._jobs.wait(job.function, job.id, wait_s)
        return _json(shown(job), job, replayed)

    async def later(self, request: web.Request) -> web.StreamResponse:
        """`Prefer: respond-async` on /invoke: the bare body becomes a job. 202, and where to look."""
        try:
            live, body = await self._body(request, ASYNC_BODY_BYTES)
            _check_json(request, body)
            kind = content_type_of(request.headers)
            bare = order(live.record.settings, body, content_type=kind, **_told_by(request))
            job, replayed = await self._jobs.submit(bare)
        except PilotflameError as error:
            return error_response(error, request_id_of(request.headers))
        response = _json({"id": job.id, "status": str(job.state)}, job, replayed)
        response.set_status(202)
        response.headers["Location"] = f"/v2/{job.function}/status/{job.id}"
        response.headers["Preference-Applied"] = "respond-async"
        return response

    async def status(self, request: web.Request) -> web.StreamResponse:
        return _json(shown(await self._job(request)))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        job = await self._job(request)
        return _json(shown(await self._jobs.cancel(job.function, job.id)))

    async def retry(self, request: web.Request) -> web.StreamResponse:
        self._live(request)
        job = await self._job(request)
        return _json(shown(await self._jobs.retry(job.function, job.id)))

    async def purge(self, request: web.Request) -> web.StreamResponse:
        removed = await self._jobs.purge(self._live(request).record.function)
        return _json({"removed": removed, "status": "completed"})

    async def health(self, request: web.Request) -> web.StreamResponse:
        live = self._live(request)
        counts, census = await self._jobs.counts(live.record.function), live.revision.census()
        running = min(census.ready, census.in_flight)
        jobs = {
            "completed": counts.completed, "failed": counts.failed, "inProgress": counts.in_progress,
            "inQueue": counts.in_queue, "retried": counts.retried, "cancelled": counts.cancelled,
        }  # fmt: skip
        workers = {
            "idle": census.ready - running, "running": running, "initializing": census.starting,
            "ready": census.ready, "throttled": 0, "unhealthy": 0, "draining": census.draining,
        }  # fmt: skip
        return _json({"jobs": jobs, "workers": workers})

    async def requests(self, request: web.Request) -> web.StreamResponse:
        """The newest jobs first, without their outputs; `?status=`, `?limit=`, `?before=` an id."""
        live = self._live(request)
        limit = min(max(1, _number(request, "limit", 100)), MAX_LISTED)
        found = await self._jobs.list(
            live.record.function, _states(request), limit, request.query.get("before", "")
        )
        return _json({"requests": [shown(job) for job in found]})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """What came since the last poll; all that comes, as events, for who accepts those."""
        job = await self._job(request)
        if EVENT_STREAM_TYPE in request.headers.get("Accept", ""):
            return await self._events(request, job)
        asked = request.query.get("after")
        after = self._polled.get(job.id, 0) if asked is None else _number(request, "after", 0)
        pieces = await self._jobs.store.pieces(job.id, after, PIECES_A_POLL)
        job = await self._jobs.get(job.function, job.id) if not pieces else job
        if asked is None:
            self._remember(job, pieces[-1][0] if pieces else 0)
        found = [{"output": orjson.Fragment(piece), "number": number} for number, piece in pieces]
        return _json({"id": job.id, "status": str(job.state), "stream": found})

    def _remember(self, job: Job, number: int) -> None:
        """RunPod's callers name no place: each poll goes on where the last one ended."""
        if number:
            self._polled[job.id] = number
            self._polled.move_to_end(job.id)
            if len(self._polled) > MAX_POLLERS:
                self._polled.popitem(last=False)
        elif job.state.final:
            self._polled.pop(job.id, None)  # told all: who asks again hears it again

    async def _events(self, request: web.Request, job: Job) -> web.StreamResponse:
        last = request.headers.get("Last-Event-ID", "0")
        after = int(last) if last.isascii() and last.isdecimal() and len(last) < 10 else 0
        response = web.StreamResponse(
            headers={"Content-Type": EVENT_STREAM_TYPE, "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        try:
            await self._tell(response, job, after)
        except PilotflameError as error:  # the head is gone: it can only be told as an event
            await response.write(event("error", orjson.dumps(error.to_wire())))
        await response.write_eof()
        return response

    async def _tell(self, response: web.StreamResponse, job: Job, after: int) -> None:
        state = None
        async for job, pieces in self._jobs.follow(job.function, job.id, after, every_s=HEARTBEAT_S):  # noqa: B020, PLR1704  as it is by now
            if job.state is not state and not job.state.final:
                state = job.state
                await response.write(event("status", orjson.dumps({"status": str(state)})))
            elif not pieces and not job.state.final:
                await response.write(b": waiting\n\n")
            for number, piece in pieces:
                await response.write(event("output", piece, number))
        name = "completed" if job.state is JobState.COMPLETED else "error"
        await response.write(event(name, orjson.dumps(shown(job))))

    # -- what all of them ask

    def _live(self, request: web.Request) -> Live:
        return self._functions.get(request.match_info["function"])

    async def _job(self, request: web.Request) -> Job:
        """Of a function that was deleted, too: what it did can be looked up."""
        return await self._jobs.get(request.match_info["function"], request.match_info["job"])

    async def _body(self, request: web.Request, limit: int) -> tuple[Live, bytes]:
        """The body, and the function as it is now: while the body came it may have been deployed anew, or deleted."""
        most = min(limit, self._max_body_bytes, self._live(request).revision.policy.max_body_bytes)
        body = await read_body(request, most, self._body_timeout_s)
        return self._live(request), body

    async def _submit(self, request: web.Request, live: Live, body: bytes) -> tuple[Job, bool]:
        return await self._jobs.submit(new_job(live, _order(body), request))


def new_job(live: Live, said: JobRequest, request: web.Request) -> NewJob:
    """A job for a live function, as an order says; its settings where it says nothing."""
    policy = said.policy
    times: dict[str, float] = {}
    if policy.executionTimeout is not None:
        times["execution_timeout_s"] = policy.executionTimeout / 1000
    if policy.ttl is not None:
        times["ttl_s"] = policy.ttl / 1000
    return order(
        live.record.settings,
        dump_json(said.input),
        **times,
        **_told_by(request),
        priority=_PRIORITIES[policy.priority] if policy.priority else int(policy.lowPriority),
        webhook=Webhook(said.webhook, said.webhook_events) if said.webhook else None,
    )


def _told_by(request: web.Request) -> dict[str, str]:
    """What of a job stands in the request's head."""
    headers = request.headers
    return {
        "owner": caller_of(request).owner,
        "idempotency": idempotency_of(headers),
        "traceparent": traceparent_of(headers),
    }


def shown(job: Job) -> dict[str, Any]:
    """A job as these routes show it: `error` is text, as RunPod's callers know it; `errorDetails` has all of it."""
    found = message.status(job, time.time())
    created = datetime.fromtimestamp(job.created_s, UTC).isoformat(timespec="milliseconds")
    found |= {
        "attempts": job.attempts, "retries": job.retries, "createdAt": created.replace("+00:00", "Z"),
    }  # fmt: skip
    if job.logs:
        found["logs"] = job.logs
    if job.error is not None:
        found["error"], found["errorDetails"] = str(job.error.get("message", "")), dict(job.error)
    return found


def _order(body: bytes) -> JobRequest:
    try:
        return JobRequest.model_validate(orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise BadInput(f"The body is not JSON: {error}.", remedy='Send {"input": …}.') from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in problem["loc"]) or "the body"
        if problem["type"] in ("missing", "model_type") and len(problem["loc"]) <= 1:
            raise BadInput(f"{where}: {problem['msg']}.", remedy='Send {"input": …}.') from None
        raise InputInvalid(f"{where}: {problem['msg']}.", details={"field": where}) from None


def _check_json(request: web.Request, body: bytes) -> None:
    """BadInput if a body that says it is JSON is none. Of one that says nothing only the handler knows."""
    kind = media_type_of(request.headers)
    if not body or not (kind == JSON_TYPE or kind.endswith("+json")):
        return
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadInput(f"The body is not JSON: {error}.", remedy="Send JSON, or say what it is.") from None


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise BadInput(f"{name} is {text[:40]!r}.", remedy="It must be a whole number.")
    return int(text)


def _states(request: web.Request) -> list[JobState]:
    try:
        return [JobState(text.upper()) for text in request.query.getall("status", [])]
    except ValueError as error:
        raise BadInput(f"{error}.", remedy=f"One of {', '.join(JobState)}.") from None


def _json(body: dict[str, Any], job: Job | None = None, replayed: bool = False) -> web.Response:
    headers = {"X-Request-Id": job.id} if job is not None else {}
    if replayed:
        headers["Idempotent-Replayed"] = "true"
    return web.Response(body=orjson.dumps(body), headers=headers, content_type="application/json")

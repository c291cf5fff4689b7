"""The routes of Cog's predictions: jobs that the caller waits for, unless they prefer not to.

Where Cog answers 409 because its slots are in use, a prediction waits in the queue. A failure is data: status 200 and
`failed`. Only an input that does not fit the handler is an error, 422, for a caller that waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal, TypeAlias

import orjson
from aiohttp import web

from ...._version import __version__
from ....errors import GatewayError, InputInvalid, PilotflameError, UnknownFunction, UnknownJob
from ....handlers.codec import JSON_TYPE
from ...access.keys import Scope
from ...api import event_stream
from ...api.backend import ASYNC_BODY_BYTES, REPLAYED, Backend
from ...api.event_stream import EVENTS, HEARTBEAT, event
from ...api.parameters import Parameter, header
from ...api.requests import caller_of, dump_json, idempotency_of, read_body, too_large
from ...api.responses import json_response
from ...api.routes import Route
from ...functions.live import Live
from ...jobs import queries
from ...jobs.job import ID_PREFIX, Job, JobState, Webhook
from .prediction import ID, Prediction, PredictionRequest, Preference, chosen_id, parse, shown, stored_id

MAX_CHOICES = 50
MAX_SHOWN_PIECES = 1000
INPUT_ERRORS = frozenset({"bad_json", "input_invalid"})
FUNCTION = header("X-Pilotflame-Function")
FUNCTION_QUERY = Parameter("function")
PREFER = header("Prefer", "respond-async, wait=seconds")
CHOSEN_ID = Parameter("id", place="path", type="string", pattern=f"^{ID.pattern}$")
Health: TypeAlias = Literal["READY", "BUSY", "STARTING", "SETUP_FAILED", "DEFUNCT"]
HEALTH = {"status": Health, "version": dict[str, str], "functions": dict[str, Health]}
HEALTHIEST_FIRST: tuple[Health, ...] = ("READY", "BUSY", "STARTING", "SETUP_FAILED", "DEFUNCT")


class PredictionsApi:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._functions = backend.functions
        self._jobs = backend.jobs

    def routes(self) -> list[Route]:
        prediction = {JSON_TYPE: Prediction, **EVENTS}
        base, one, invoke = "/predictions", "/predictions/{id}", Scope.INVOKE
        which, chosen_by = (FUNCTION_QUERY, FUNCTION), (FUNCTION_QUERY, FUNCTION, PREFER)
        cancel, errors = f"{one}/cancel", (404, 410, 503)
        create: dict[str, Any] = {
            "other_responses": {202: Prediction},
            "body": PredictionRequest,
            "errors": (400, 404, 408, 409, 413, 422, 503),
        }
        return [
            Route(
                "POST", base, self.create, invoke, "Make a prediction.", prediction,
                parameters=chosen_by, **create,
            ),
            Route(
                "PUT", one, self.create, invoke, "Make the prediction with this id.", prediction,
                parameters=(CHOSEN_ID, *chosen_by), **create,
            ),
            Route("GET", one, self.show, invoke, "Show a prediction.", prediction, errors=errors),
            Route("POST", cancel, self.cancel, invoke, "Cancel a prediction.", prediction, errors=errors),
            Route(
                "GET", "/health-check", self.health, None, "Show the health of one function or all.", HEALTH,
                parameters=which, errors=(404,),
            ),
        ]  # fmt: skip

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Make a new prediction; with an id in the path or body, or with an Idempotency-Key, the same one each time."""
        preference = Preference.of(request.headers.getall("Prefer", ()))
        limit = self._backend.max_body_bytes
        limit = limit if preference.wait_s is None else min(limit, ASYNC_BODY_BYTES)
        body = await read_body(request, limit, self._backend.body_timeout_s)
        wanted = parse(body)
        wanted_id = _wanted_id(wanted, request.match_info.get("id"))
        live = self._live(request, wanted.version)
        if len(body) > live.revision.policy.max_body_bytes:
            raise too_large(live.revision.policy.max_body_bytes)
        job, replayed = await self._submit(request, live, wanted, wanted_id)
        if event_stream.accepts_events(request):
            return await self._send_events(request, job)
        if preference.wait_s is None:
            job = await self._wait(job, live, replayed=replayed)
            _refuse_input(job)
        elif preference.wait_s:
            job = await self._jobs.wait(job.function, job.id, preference.wait_s)
        waited = preference.wait_s != 0 and job.state.final
        return await self._response(job, 200 if waited else 202, replayed=replayed)

    async def show(self, request: web.Request) -> web.StreamResponse:
        job = await self._job(request)
        return await (
            self._send_events(request, job) if event_stream.accepts_events(request) else self._response(job)
        )

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        job = await self._job(request)
        return await self._response(await self._jobs.store.cancel(job.function, job.id))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Show one function or all. One without a worker is READY: a prediction starts it."""
        if named := _named(request):
            caller_of(request).check(named)
            if all(live.record.function != named for live in self._functions.all()):
                raise UnknownFunction.named(named)
        found = {name: self._health(name) for name in ([named] if named else self._names(request))}
        status: Health = min(found.values(), key=HEALTHIEST_FIRST.index, default="READY")
        version = {"pilotflame": __version__}
        return json_response({"status": status, "version": version, "functions": found})

    def _health(self, name: str) -> Health:
        try:
            revision = self._functions.live(name)
        except (UnknownFunction, GatewayError):
            return "DEFUNCT"
        census, scale = revision.census(), revision.policy.scale
        if not census.ready and revision.failures:
            return "SETUP_FAILED"
        if not census.ready and census.starting:
            return "STARTING"
        return "BUSY" if census.in_flight >= scale.max * scale.concurrency else "READY"

    async def _submit(
        self, request: web.Request, live: Live, wanted: PredictionRequest, wanted_id: str
    ) -> tuple[Job, bool]:
        key = f"prediction:{wanted_id}" if wanted_id else idempotency_of(request.headers)
        return await self._backend.submit(
            request,
            live,
            dump_json(wanted.input),
            webhook=Webhook(wanted.webhook, wanted.events) if wanted.webhook else None,
            idempotency=key,
            wanted_id=stored_id(wanted_id, caller_of(request).owner),
        )

    async def _wait(self, job: Job, live: Live, *, replayed: bool) -> Job:
        """Wait for the end. A caller that goes away cancels a prediction that only they have requested."""
        policy = live.revision.policy
        try:
            return await self._jobs.wait(job.function, job.id, policy.hold_s + policy.timeout_s)
        except (asyncio.CancelledError, ConnectionError):
            if not replayed:
                with contextlib.suppress(PilotflameError):
                    await self._jobs.store.cancel(job.function, job.id)
            raise

    async def _send_events(self, request: web.Request, job: Job) -> web.StreamResponse:
        """Send `start`, `output` for each piece, `log`, `completed`; `error` if they break off."""
        async with event_stream.open_stream(request, {"X-Job-Id": job.id}) as response:
            started, pieces = False, 0
            last = event_stream.last_event_id(request)
            news = self._jobs.follow(job.function, job.id, last, every_s=event_stream.HEARTBEAT_S)
            async for job, new in news:  # noqa: PLR1704
                if not started and job.started_s:
                    started = True
                    start = {"id": chosen_id(job), "status": "processing"}
                    await response.write(event("start", orjson.dumps(start)))
                for number, piece in new:
                    pieces = number
                    chunk = {"chunk": orjson.Fragment(piece), "index": number - 1}
                    await response.write(event("output", orjson.dumps(chunk), number))
                if not new and not job.state.final:
                    await response.write(HEARTBEAT)
            await _send_end(response, job, streamed=bool(pieces))
        return response

    async def _response(self, job: Job, status: int = 200, *, replayed: bool = False) -> web.Response:
        pieces: list[bytes] = []
        if job.pieces and not job.state.final:
            pieces = [piece for _, piece in await self._jobs.store.pieces(job.id, 0, MAX_SHOWN_PIECES)]
        headers = {"X-Job-Id": job.id, **(REPLAYED if replayed else {})}
        return json_response(shown(job, pieces), status=status, headers=headers)

    def _names(self, request: web.Request) -> list[str]:
        caller = caller_of(request)
        names = (live.record.function for live in self._functions.all())
        return [name for name in names if caller.allows(name)]

    def _live(self, request: web.Request, version: str | None) -> Live:
        """Return the function that the header, the query or `version` names; else the only one."""
        if named := _named(request) or version:
            caller_of(request).check(named)
            return self._functions.get(named)
        names = self._names(request)
        if not names:
            raise UnknownFunction("There is no function to predict with.", remedy="Deploy one.")
        if len(names) > 1:
            raise InputInvalid(
                f"There are {len(names)} functions, and the prediction names none of them.",
                remedy=f'Name one: "version" in the body, ?function= or {FUNCTION.name}.',
                details={"functions": names[:MAX_CHOICES]},
            )
        return self._functions.get(names[0])

    async def _job(self, request: web.Request) -> Job:
        """Return a job, also one of a function that was deleted."""
        caller, job_id = caller_of(request), request.match_info["id"]
        names = self._names(request)
        try:
            job = await self._jobs.store.find(stored_id(job_id, caller.owner), caller.allows, names)
        # The id was generated, or chosen before there were keys.
        except UnknownJob:
            job = await self._jobs.store.find(job_id, caller.allows, names)
        # A chosen id can be guessed, so its job is shown only to its owner.
        foreign = job.owner not in ("", caller.owner) and not job.id.startswith(ID_PREFIX)
        if foreign and Scope.ADMIN not in caller.scopes:
            raise queries.unknown(job_id)
        return job


async def _send_end(response: web.StreamResponse, job: Job, *, streamed: bool) -> None:
    prediction = shown(job)
    if job.state is JobState.COMPLETED and not streamed and not job.pieces:
        await response.write(event("output", orjson.dumps({"chunk": prediction["output"], "index": 0})))
    if job.logs:
        await response.write(event("log", orjson.dumps({"source": "stdout", "data": job.logs})))
    await response.write(event("completed", orjson.dumps(prediction)))


def _named(request: web.Request) -> str:
    return request.headers.get(FUNCTION.name, "") or request.query.get(FUNCTION_QUERY.name, "")


def _wanted_id(wanted: PredictionRequest, path_id: str | None) -> str:
    """Return the id that the caller chose; "" if they did not."""
    if path_id is not None and wanted.id not in (None, path_id):
        raise InputInvalid("The id in the body is not the one in the path.", remedy="Omit it from the body.")
    wanted_id = path_id or wanted.id or ""
    if wanted_id and not ID.fullmatch(wanted_id):
        raise InputInvalid(
            f"{wanted_id[:128]!r} cannot be a prediction's id.",
            remedy="Use 1 to 128 of A-Z a-z 0-9 . _ ~ and -, and do not begin with job-.",
        )
    return wanted_id


def _refuse_input(job: Job) -> None:
    """Raise the error of an input that does not fit the handler."""
    if job.state is JobState.FAILED and job.error is not None and job.error.get("type") in INPUT_ERRORS:
        raise PilotflameError.from_wire(dict(job.error))

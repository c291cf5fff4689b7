"""Serves the routes of Cog's predictions. A prediction is a job. By default, the request waits for the job's end.

While all workers are busy, a prediction waits in the queue, whereas Cog itself responds with 409. A failed prediction
is returned with HTTP status 200, and its `status` is "failed". There is one exception: if the request waits without a
limit, and the input or the output does not fit the handler, the response is an error with status 422 or 500.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import orjson
from aiohttp import web

from ...._version import __version__
from ....errors import GatewayError, InputInvalid, PilotflameError, UnknownFunction
from ....handlers.codec import JSON_TYPE
from ....handlers.contract import NOTHING
from ....handlers.files import UNAVAILABLE
from ...front.api.backend import ASYNC_BODY_BYTES, Backend
from ...front.api.job_events import JobEncoder, send_job
from ...front.api.plugin import ApiPlugin
from ...front.http.event_stream import EVENTS, accepts_events, event
from ...front.http.requests import caller_of, dump_json, preferences_of
from ...front.http.responses import dumped, json_response
from ...front.http.routes import Parameter, Route, header
from ...ground.access.keys import Scope
from ...jobs.stored.job import Job, JobState
from ...jobs.stored.webhook_body import WebhookBodies
from ...node.functions.live import Live
from ...node.functions.status import FunctionStatus
from ..predictions.cog_version import COG_VERSION
from ..predictions.prediction import FORM, chosen_id, prediction_of, webhook_body
from ..predictions.predictor_schema import predictor_components, predictor_document
from ..predictions.requests import (
    ID,
    Prediction,
    PredictionError,
    PredictionRequest,
    check_size,
    detailed_error,
    find_prediction,
    prediction_response,
    read_prediction,
    wait_in,
)
from .dialect import CogDialect

MAX_CHOICES = 50
MAX_WAIT_S = 300.0
# If the caller does not wait for the end, the response is sent once a worker has the prediction, or after this time.
START_S = 0.1
# If a prediction fails with one of these codes, a caller who waits without a limit gets an error response.
ERRORS = frozenset({"bad_json", "input_invalid", "input_too_large", "output_invalid"})
REMEDY = 'Send for example {"input": {"text": "hello"}}.'
FUNCTION = header("X-Pilotflame-Function")
FUNCTION_QUERY = Parameter("function")
PREFER = header("Prefer", "respond-async, wait=seconds")
CHOSEN_ID = Parameter("id", place="path", type="string", pattern=f"^{ID.pattern}$")
INDEX, DOCUMENT = "/", "/openapi.json"
Health: TypeAlias = Literal["READY", "BUSY", "STARTING", "SETUP_FAILED", "DEFUNCT"]
HEALTH = {
    "status": Health,
    "setup": dict[str, str],
    "version": dict[str, str],
    "functions": dict[str, Health],
}
# The status of the setup, in Cog's form. Until a worker has started, the status is unknown.
SETUPS: dict[Health, dict[str, str]] = {
    "READY": {"status": "succeeded"}, "BUSY": {"status": "succeeded"}, "STARTING": {},
    "SETUP_FAILED": {"status": "failed"}, "DEFUNCT": {"status": "failed"},
}  # fmt: skip
HEALTHIEST_FIRST: tuple[Health, ...] = ("READY", "BUSY", "STARTING", "SETUP_FAILED", "DEFUNCT")


class PredictionsApi(ApiPlugin):
    """The routes of Cog's predictions and of the health check."""

    base: ClassVar = "/cog"
    webhook_bodies: ClassVar[WebhookBodies] = {FORM: webhook_body}
    root: ClassVar[Mapping[str, str]] = {
        "cog_version": COG_VERSION,
        "healthcheck_url": "/health-check",
        "predictions_url": "/predictions",
        "predictions_idempotent_url": "/predictions/{prediction_id}",
        "predictions_cancel_url": "/predictions/{prediction_id}/cancel",
    }

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._backend = backend
        self._jobs = backend.jobs

    def describe(
        self, document: dict[str, Any], functions: Sequence[FunctionStatus], *, named: bool
    ) -> dict[str, Any]:
        """Return Cog's document (OpenAPI 3.0) if the caller named one function, and this function is a predictor.

        Otherwise return `document`. If there is only one function, add its components `Input` and `Output`.
        """
        if len(functions) != 1:
            return document
        if named and functions[0].dialect == CogDialect.name:
            return predictor_document(functions[0])
        schemas = document["components"]["schemas"]
        components = document["components"] | {
            "schemas": schemas | predictor_components(functions[0], schemas)
        }
        return document | {"components": components}

    def routes(self) -> list[Route]:
        prediction = {JSON_TYPE: Prediction, **EVENTS}
        base, one, cancel = "/predictions", "/predictions/{id}", "/predictions/{id}/cancel"
        which, errors = (FUNCTION_QUERY, FUNCTION), (404, 410, 503)
        create: dict[str, Any] = {
            "response": prediction, "other_responses": {202: Prediction}, "body": PredictionRequest,
            "errors": (400, 404, 408, 409, 413, 422, 500, 503), "parameters": (*which, PREFER),
        }  # fmt: skip
        same = create | {"parameters": (CHOSEN_ID, *which, PREFER)}
        call, health = Scope.INVOKE, "Show the health of one function or all."
        rows = [
            Route("POST", base, self.create, call, "Make a prediction.", **create),
            Route("PUT", one, self.create, call, "Make the prediction with this id.", **same),
            Route("GET", one, self.show, call, "Show a prediction.", prediction, errors=errors),
            Route("POST", cancel, self.cancel, call, "Cancel a prediction.", prediction, errors=errors),
        ]
        checked = Route(
            "GET", "/health-check", self.health, None, health, HEALTH, errors=(404,), parameters=which
        )
        rows += [
            Route("GET", INDEX, self.index, None, "Name the routes of predictions.", dict[str, str]),
            Route(
                "GET", DOCUMENT, self.document, call, "Describe a function as Cog's server does.", dict[str, Any],
                errors=(404, 422), parameters=which,
            ),
        ]  # fmt: skip
        detailed: dict[str, Any] = {"error_format": detailed_error, "error_type": PredictionError}
        return [checked, *(dataclasses.replace(row, **detailed) for row in rows)]

    def bare_routes(self) -> list[Route]:
        # Without the prefix, `/` and `/openapi.json` belong to the gateway, whose answers have Cog's fields, too.
        return [row for row in self.routes() if row.path not in (INDEX, DOCUMENT)]

    async def index(self, _request: web.Request) -> web.StreamResponse:
        urls = {name: self.base + text if text.startswith("/") else text for name, text in self.root.items()}
        return json_response(urls | {"openapi_url": self.base + DOCUMENT})

    async def document(self, request: web.Request) -> web.StreamResponse:
        return json_response(predictor_document(self._live(request, None).status()))

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Make a prediction, or return the existing one with the same id or Idempotency-Key."""
        wait_s = preferred_wait(preferences_of(request))
        limit = self._backend.max_body_bytes
        limit = limit if wait_s is None else min(limit, ASYNC_BODY_BYTES)
        wanted, body = await read_prediction(request, self._backend, limit, REMEDY)
        owner = caller_of(request).owner
        path_id = request.match_info.get("id")
        fields = wanted.fields(path_id, owner, request.headers, waits=wait_s is None)
        live = self._live(request, wanted.version)
        check_size(live, body)
        event = await dumped(request, dump_json, wanted.input)
        job, replayed = await self._backend.submit(request, live, event, **fields)
        # Free the input, both its bytes and the parsed values, while the caller waits.
        job = job.bare()
        del wanted, body, fields, event
        if accepts_events(request):
            return await send_job(request, self._jobs, job, _encoder())
        if wait_s is None:
            job = await self._wait(job, live, replayed=bool(replayed))
            if job.state is JobState.FAILED and job.error and _is_error(job.error):
                raise PilotflameError.from_wire(dict(job.error))
        elif wait_s:
            job = await self._jobs.wait(job.function, job.id, wait_s)
        else:
            job = await self._started(job)
        waited, changes = wait_s != 0 and job.state.final, {}
        if wait_s and not waited:
            # Some callers, such as Replicate's clients, wait only while the status is "starting".
            changes["status"] = "starting"
        return await self._response(request, job, 200 if waited else 202, changes, **replayed)

    async def show(self, request: web.Request) -> web.StreamResponse:
        job = await find_prediction(request, self._backend)
        if accepts_events(request):
            job = job.bare()
            return await send_job(request, self._jobs, job, _encoder())
        return await self._response(request, job)

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        job = await find_prediction(request, self._backend)
        return await self._response(request, await self._jobs.store.cancel(job.function, job.id))

    async def health(self, request: web.Request) -> web.StreamResponse:
        """Show the health of the named function or of all functions. The healthiest function gives the overall status.

        A function without a worker is also READY, because a prediction starts a worker.
        """
        named, names = _named(request), self._backend.names(request)
        if named and named not in names:
            raise UnknownFunction.named(named)
        found = {name: self._health(name) for name in ([named] if named else names)}
        status: Health = min(found.values(), key=HEALTHIEST_FIRST.index, default="READY")
        version = {"pilotflame": __version__}
        return json_response(
            {"status": status, "setup": SETUPS[status], "version": version, "functions": found}
        )

    def _health(self, name: str) -> Health:
        try:
            live = self._backend.functions.get(name)
        except (UnknownFunction, GatewayError):
            return "DEFUNCT"
        worker_counts, scale = live.workers.worker_counts(), live.revision.policy.scale
        if not worker_counts.ready and live.workers.breaker.failures:
            return "SETUP_FAILED"
        if not worker_counts.ready and worker_counts.starting:
            return "STARTING"
        return "BUSY" if worker_counts.in_flight >= scale.max * scale.concurrency else "READY"

    async def _wait(self, job: Job, live: Live, *, replayed: bool) -> Job:
        """Wait for the job's end, for at most the function's `hold_s` + `timeout_s`. Return the job.

        If the caller disconnects, the job is cancelled, unless an earlier request created it (`replayed`).
        """
        settings = live.record.settings
        try:
            return await self._jobs.wait(job.function, job.id, settings.hold_s + settings.timeout_s)
        except (asyncio.CancelledError, ConnectionError):
            if not replayed:
                with contextlib.suppress(PilotflameError):
                    await self._jobs.store.cancel(job.function, job.id)
            raise

    async def _started(self, job: Job) -> Job:
        """Wait until a worker has the job, at most START_S, and return the job. Cog waits for this too."""
        with self._jobs.watch(job.id) as news, contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while (await self._jobs.store.glance(job.function, job.id)).state is JobState.IN_QUEUE:
                    await news.wait()
                    news.clear()
        return await self._jobs.store.get(job.function, job.id)

    async def _response(
        self,
        request: web.Request,
        job: Job,
        status: int = 200,
        changes: Mapping[str, str] = NOTHING,
        **headers: str,
    ) -> web.Response:
        """Return the response with the prediction, in which the fields of `changes` replace its own."""
        return await prediction_response(
            request, self._jobs, job, lambda prediction: prediction | dict(changes),
            status=status, headers=headers | {"X-Job-Id": job.id},
        )  # fmt: skip

    def _live(self, request: web.Request, version: str | None) -> Live:
        """Return the function that the request names, or else the only function that the caller may see.

        Raise UnknownFunction if the caller may see no function, and InputInvalid if the caller may see several.
        """
        if named := _named(request) or version:
            caller_of(request).check(named)
            return self._backend.functions.get(named)
        names = self._backend.names(request)
        if not names:
            raise UnknownFunction("There is no function to predict with.", remedy="Deploy one.")
        if len(names) > 1:
            remedy = f'Name one: "version" in the body, ?function= or {FUNCTION.name}.'
            details = {"functions": names[:MAX_CHOICES]}
            raise InputInvalid("The prediction names no function.", remedy=remedy, details=details)
        return self._backend.functions.get(names[0])


def preferred_wait(preferences: Mapping[str, str]) -> float | None:
    """Return the seconds for which the caller prefers to wait for the job's end, or None for no limit."""
    wait_s = wait_in(preferences, MAX_WAIT_S)
    return 0.0 if wait_s is None and "respond-async" in preferences else wait_s


def _is_error(error: Mapping[str, Any]) -> bool:
    """Return True if the caller gets this error of a job as the response, instead of the failed prediction.

    As in Cog, an input file that cannot be fetched only makes the prediction fail.
    """
    problems = error.get("details", {}).get("problems", ())
    unavailable = bool(problems) and all(one.get("type") == UNAVAILABLE for one in problems)
    return error.get("type") in ERRORS and not unavailable


def _encoder() -> JobEncoder:
    started = False

    def encode(job: Job, pieces: Sequence[tuple[int, bytes]]) -> Iterator[bytes]:
        nonlocal started
        if not started and job.started_s:
            started = True
            yield event("start", orjson.dumps({"id": chosen_id(job), "status": "processing"}))
        for number, piece in pieces:
            chunk = {"chunk": orjson.Fragment(piece), "index": number - 1}
            yield event("output", orjson.dumps(chunk), number)
        if job.state.final and not pieces:
            prediction = prediction_of(job)
            if job.state is JobState.COMPLETED and not job.pieces:
                yield event("output", orjson.dumps({"chunk": prediction["output"], "index": 0}))
            if job.logs:
                yield event("log", orjson.dumps({"source": "stdout", "data": job.logs}))
            yield event("completed", orjson.dumps(prediction))

    return encode


def _named(request: web.Request) -> str:
    return request.headers.get(FUNCTION.name, "") or request.query.get(FUNCTION_QUERY.name, "")

"""Serves Replicate's predictions. A prediction is a job. A request waits for the job's end only if it asks to wait.

The function's name is also the `version`, the name of the model and the name of the deployment (see `models.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from aiohttp import web

from ....errors import InputInvalid
from ....handlers.contract import NOTHING
from ...front.api.backend import ASYNC_BODY_BYTES, Backend
from ...front.api.plugin import ApiPlugin
from ...front.http.requests import Headers, caller_of, owner_of, preferences_of
from ...front.http.responses import json_response
from ...front.http.routes import Route, header
from ...ground.access.keys import Scope
from ...jobs.stored.job import Job
from ...jobs.stored.webhook_body import WebhookBodies
from ..predictions.prediction import FORM, prediction_of, webhook_body
from ..predictions.requests import (
    Prediction,
    PredictionRequest,
    check_size,
    find_prediction,
    prediction_response,
    read_prediction,
    wait_in,
)
from .account import AccountApi
from .file_store import FileStore
from .files import FilesApi
from .models import CURSOR, OWNER, ModelsApi, page_of
from .problem import ERRORS
from .shared_files import SharedFileStore
from .stream import StreamApi

MAX_WAIT_S = 60.0
PAGE = 100
REMEDY = 'Send for example {"version": "hello", "input": {"text": "hello"}}.'
PREFER = header("Prefer", f"wait or wait=seconds, {MAX_WAIT_S:.0f} at most.")


class ReplicatePrediction(Prediction):
    """A prediction as Replicate's clients read it."""

    model: str
    data_removed: bool
    source: Literal["api"]
    urls: dict[str, str]


class ReplicateApi(ApiPlugin):
    """The routes of Replicate's API."""

    base: ClassVar = "/replicate"
    webhook_bodies: ClassVar[WebhookBodies] = {FORM: webhook_body}

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._backend, self._jobs = backend, backend.jobs
        self._models, self._stream = ModelsApi(backend, self.origin_of), StreamApi(backend.jobs)
        self._account = AccountApi(backend)
        self._files = FilesApi(_file_store(backend), backend.origins, self.origin_of)
        if backend.database is not None:
            self._jobs.prepare_with(self._files.brought)

    async def sweep(self) -> None:
        """Remove expired files that callers uploaded, now and every hour."""
        await self._files.sweep()

    def routes(self) -> list[Route]:
        base, one, call, kind = "/v1/predictions", "/v1/predictions/{id}", Scope.INVOKE, ReplicatePrediction
        errors = (400, 404, 408, 409, 413, 422, 503)
        create: dict[str, Any] = {
            "status": 201, "body": PredictionRequest, "errors": errors, "parameters": (PREFER,), **ERRORS,
        }  # fmt: skip
        found: dict[str, Any] = {"errors": (404, 410, 503), **ERRORS}
        listing: dict[str, Any] = {"errors": (404, 503), "parameters": (CURSOR,), **ERRORS}
        model, deployment = (
            "/v1/models/{owner}/{name}/predictions",
            "/v1/deployments/{owner}/{name}/predictions",
        )
        own = [
            Route("POST", base, self.create, call, "Make a prediction.", kind, **create),
            Route("POST", model, self.create, call, "Make a prediction with a model.", kind, **create),
            Route(
                "POST", deployment, self.create, call, "Make a prediction with a deployment.", kind, **create
            ),
            Route(
                "GET", base, self.list, call, "List predictions, the newest first.", page_of(kind), **listing
            ),
            Route("GET", one, self.show, call, "Show a prediction.", kind, **found),
            Route("POST", f"{one}/cancel", self.cancel, call, "Cancel a prediction.", kind, **found),
        ]
        return [
            *own,
            *self._models.routes(),
            *self._account.routes(),
            *self._files.routes(),
            *self._stream.routes(),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Make a prediction. If it has not ended when the wait is over, its status is `starting`."""
        wait_s = preferred_wait(preferences_of(request))
        most = min(self._backend.max_body_bytes, ASYNC_BODY_BYTES)
        wanted, body = await read_prediction(request, self._backend, most, REMEDY)
        reference = request.match_info.get("name") or wanted.version
        if not reference:
            raise InputInvalid("The prediction names no version.", remedy=REMEDY)
        live = self._models.live(request, reference)
        check_size(live, body)
        settings = live.record.settings
        fields = wanted.fields(None, caller_of(request).owner, request.headers, waits=False)
        inside = None if settings.image.name is None else min(most, settings.max_body_bytes)
        given, files = await self._files.given(request, body, wanted.input, inside)
        if files:
            fields["extra"]["prediction"]["files"] = files
        job, replayed = await self._backend.submit(request, live, given, **fields)
        if wait_s:
            # Free the memory of the input, both as bytes and parsed, while the caller waits.
            job = job.bare()
            del wanted, body, given, fields
            job = await self._jobs.wait(job.function, job.id, wait_s)
        # Replicate's clients wait on only while the status is "starting".
        changes = {"status": "starting"} if wait_s and not job.state.final else {}
        return await self._response(request, job, changes, status=201, headers=replayed)

    async def list(self, request: web.Request) -> web.StreamResponse:
        """List the caller's predictions, without inputs and outputs."""
        names, owner = self._backend.names(request), owner_of(request)
        cursor = request.query.get(CURSOR.name, "")
        jobs = await self._jobs.store.latest(names, PAGE, cursor, owner)
        base = f"{self.origin_of(request)}/v1/predictions"
        following = f"{base}?cursor={jobs[-1].id}" if len(jobs) == PAGE else None
        before = None
        if cursor:
            # The previous page ends with the job that the cursor names.
            newer = [cursor, *await self._jobs.store.newer_ids(names, PAGE, cursor, owner)]
            before = f"{base}?cursor={newer[PAGE]}" if len(newer) > PAGE else base
        results = [self._whole(request, job, prediction_of(job)) for job in jobs]
        return json_response({"previous": before, "next": following, "results": results})

    async def show(self, request: web.Request) -> web.StreamResponse:
        return await self._response(request, await find_prediction(request, self._backend))

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        job = await find_prediction(request, self._backend)
        cancelled = await self._jobs.store.cancel(job.function, job.id, owner_of(request))
        return await self._response(request, cancelled)

    async def _response(
        self, request: web.Request, job: Job, changes: Mapping[str, str] = NOTHING, *,
        status: int = 200, headers: Headers | None = None,
    ) -> web.Response:  # fmt: skip
        """Return a response with the prediction, in which the fields of `changes` replace its own."""
        return await prediction_response(
            request, self._jobs, job, lambda found: self._whole(request, job, found) | dict(changes),
            status=status, headers=headers,
        )  # fmt: skip

    def _whole(self, request: web.Request, job: Job, prediction: dict[str, Any]) -> dict[str, Any]:
        origin = self.origin_of(request)
        own = f"{origin}/v1/predictions/{job.id}"
        urls = {"get": own, "cancel": f"{own}/cancel", "stream": origin + self._stream.path(job)}
        more = {"model": f"{OWNER}/{job.function}", "data_removed": False, "source": "api", "urls": urls}
        return prediction | {"id": job.id} | more


def _file_store(backend: Backend) -> FileStore:
    root, check_disk = backend.state / "files", backend.disk.check
    if backend.database is None:
        return FileStore(root, check_disk)
    # Import it here, because it needs psycopg, which a gateway without the setting `database` need not have.
    from ...ground.storing.postgres_blobs import PostgresBlobs  # noqa: PLC0415

    return SharedFileStore(
        root, check_disk, backend.database, PostgresBlobs(backend.database, "upload_files")
    )


def preferred_wait(preferences: Mapping[str, str]) -> float:
    """Return the seconds for which the caller prefers to wait, or 0 if the caller does not ask to wait."""
    return MAX_WAIT_S if preferences.get("wait") == "" else wait_in(preferences, MAX_WAIT_S) or 0.0

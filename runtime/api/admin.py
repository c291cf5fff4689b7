"""Serves the control routes: deploy, list, show and delete functions; health and metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel, Field

from ...errors import CodeError, Forbidden, SettingsError, UnsupportedMedia
from ...handlers.codec import JSON_TYPE
from ..access.keys import Caller, Scope
from ..functions.deploy import Deployment
from ..functions.live import Deployed, FunctionStatus, Live, Prefetched, SourceStatus
from ..functions.progress import Progress
from ..functions.registry import Functions
from ..telemetry.logs import Logs
from ..telemetry.metrics import Metrics
from .audit import note
from .requests import caller_of, load_json, media_type_of, read_body, validate
from .responses import json_response
from .routes import Flag, Parameter, Route

MAX_ARCHIVE_BYTES = 256 << 20
UPLOAD_TIMEOUT_S = 600.0
DEPLOY_REMEDY = 'Send {"path": "/folder"} as application/json, or a tar.gz as application/gzip.'
ARCHIVE_REMEDY = "Put weights in a snapshot folder, which is not uploaded."
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
ARCHIVE_TYPES = ("application/gzip", "application/x-gzip", "application/octet-stream")
SET = Parameter("set", "Of an upload: settings, as scale.max=8.", type="array", items={"type": "string"})
FOLDER = Parameter(
    "folder", "Of an upload: the folder's name, which is the function's if no setting names it."
)
INSTALL = Flag("install", "Of an upload: install its requirements.")
CHECK = Flag("check", "Of an upload: start a worker before the function goes live.", default=True)
MEMORY = Flag("memory", "Include the function's processes and their memory.")


class DeployRequest(BaseModel, frozen=True, extra="forbid"):
    """A deploy of a folder on the gateway's machine."""

    path: Path
    overrides: dict[str, Any] = Field(default_factory=dict, description="Dotted settings, as scale.max.")
    install: bool = False
    check: bool = True


class Admin:
    """The control routes of a gateway. While `draining` is true, /readyz responds with 503."""

    def __init__(
        self,
        functions: Functions,
        metrics: Metrics,
        logs: Logs,
        *,
        local: bool,
        sources: Callable[[str], list[SourceStatus]] = lambda _function: [],
        disk_full: Callable[[], bool] = lambda: False,
        starting: Callable[[], bool] = lambda: False,
    ) -> None:
        """`local`: only this machine can reach the gateway. Only then may callers deploy folders by path.

        `sources` returns how a function's event sources do. `disk_full` is called in a thread, and returns whether
        the state folder's disk is full. While `starting` returns True, /readyz responds with 503 too.
        """
        self._sources = sources
        self._disk_full, self._starting = disk_full, starting
        self._functions = functions
        self._logs = logs
        self._metrics = metrics
        self._local = local
        self.draining = False

    def routes(self) -> list[Route]:
        functions, function, deploy = "/v1/functions", "/v1/functions/{function}", Scope.DEPLOY
        read = Scope.READ
        listing, ready = (
            {"functions": list[FunctionStatus]},
            {"status": Literal["ready", "draining", "starting", "disk_full"]},
        )
        probe: Any = {"public": True, "errors": ()}
        return [
            Route(
                "POST", functions, self.deploy, deploy, "Deploy a folder or a tar.gz.", Deployed, 201,
                parameters=(SET, FOLDER, INSTALL, CHECK), body={JSON_TYPE: DeployRequest, "application/gzip": bytes},
                errors=(400, 408, 413, 415, 422, 500, 502, 503, 507),
            ),
            Route("GET", functions, self.list, read, "List the functions.", listing),
            Route("GET", function, self.status, read, "Show a function.", FunctionStatus, parameters=(MEMORY,)),
            Route("DELETE", function, self.delete, deploy, "Delete a function.", {"deleted": str}),
            Route(
                "POST", f"{function}/prefetch", self.prefetch, deploy,
                "Bring a function's image and weights to this node.", Prefetched,
                errors=(404, 422, 500, 502, 503, 507),
            ),
            Route("GET", "/healthz", self.health, None, "Liveness.", {"status": Literal["alive"]}, **probe),
            Route("GET", "/readyz", self.ready, None, "Readiness.", ready, other_responses={503: ready}, **probe),
            Route("GET", "/metrics", self.metrics, read, "Prometheus metrics.", {"text/plain": str}),
        ]  # fmt: skip

    async def deploy(self, request: web.Request) -> web.StreamResponse:
        progress, caller = Progress(), caller_of(request)
        deployment = await self._deployment(request, progress)
        deployment = replace(
            deployment, authorize=caller.check_deploy, owner=caller.owner, deployer=caller.name
        )
        live = await self._functions.deploy(deployment, progress)
        note(request, function=live.record.function, revision=live.record.revision)
        return json_response(_deployed(live, progress).model_dump(mode="json"), status=201)

    async def list(self, request: web.Request) -> web.StreamResponse:
        return json_response({"functions": [one.model_dump(mode="json") for one in self.statuses(request)]})

    async def status(self, request: web.Request) -> web.StreamResponse:
        live = self._functions.get(request.match_info["function"])
        processes = await live.processes() if MEMORY.read(request) else None
        found = {
            "last_errors": await live.last_errors(self._logs),
            "sources": self._sources(live.record.function),
        }
        status = live.status(processes).model_copy(update=found)
        return json_response(_visible(status, caller_of(request)).model_dump(mode="json"))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        await self._functions.delete(name)
        return json_response({"deleted": name})

    async def prefetch(self, request: web.Request) -> web.StreamResponse:
        found = await self._functions.prefetch(request.match_info["function"])
        return json_response(found.model_dump(mode="json"))

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        if self.draining:
            return json_response({"status": "draining"}, status=503, headers={"Retry-After": "5"})
        if self._starting():
            return json_response({"status": "starting"}, status=503, headers={"Retry-After": "1"})
        if await asyncio.to_thread(self._disk_full):
            return json_response({"status": "disk_full"}, status=503, headers={"Retry-After": "60"})
        return json_response({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if caller_of(request).functions is not None:
            remedy = "Use a key with the scope read for all functions."
            raise Forbidden("The metrics are of all functions, and this key covers some.", remedy=remedy)
        return web.Response(body=await self._metrics.read(), headers={"Content-Type": METRICS_TYPE})

    def statuses(self, request: web.Request) -> Iterator[FunctionStatus]:
        """Yield the status of each function that the caller may see."""
        caller = caller_of(request)
        found = (live.status() for live in self._functions.all() if caller.allows(live.record.function))
        return (_visible(status, caller) for status in found)

    async def _deployment(self, request: web.Request, progress: Progress) -> Deployment:
        # Not `request.content_type`: for a request without this header, which any web page can send, aiohttp
        # returns application/octet-stream, and the body would be accepted as an archive.
        kind = media_type_of(request.headers)
        if kind in ARCHIVE_TYPES:
            overrides = dict(_pair(text) for text in request.query.getall("set", []))
            install, check = INSTALL.read(request), CHECK.read(request)
            with progress.step("upload"):
                body = await read_body(request, MAX_ARCHIVE_BYTES, UPLOAD_TIMEOUT_S, remedy=ARCHIVE_REMEDY)
            folder_name = request.query.get(FOLDER.name, "")
            return Deployment(
                archive=body, folder_name=folder_name, overrides=overrides, install=install, check=check
            )
        if kind != JSON_TYPE:
            raise UnsupportedMedia(f"A deploy cannot be of type {kind[:64]!r}.", remedy=DEPLOY_REMEDY)
        body = await read_body(request, MAX_ARCHIVE_BYTES, UPLOAD_TIMEOUT_S)
        wanted = validate(DeployRequest, load_json(body), DEPLOY_REMEDY)
        if not self._local:
            remedy = "Upload the folder: pilotflame deploy --upload."
            message = "This gateway takes no folders by path: it listens beyond its machine."
            raise CodeError(message, remedy=remedy)
        return Deployment(**dict(wanted))


def _deployed(live: Live, progress: Progress) -> Deployed:
    replaces = progress.target.replaces if progress.target is not None else None
    return Deployed(**dict(live.status()), replaces=replaces, steps=progress.steps)


def _visible(status: FunctionStatus, caller: Caller) -> FunctionStatus:
    """Return the status without what only those may see who may deploy: the environment, and error texts."""
    if caller.has(Scope.DEPLOY):
        return status
    settings = status.settings.model_copy(update={"env": dict.fromkeys(status.settings.env, "…")})
    errors = [error.model_copy(update={"text": ""}) for error in status.last_errors]
    sources = [source.model_copy(update={"last_error": ""}) for source in status.sources]
    return status.model_copy(update={"settings": settings, "last_errors": errors, "sources": sources})


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(f"set={text[:80]!r} is not key=value.", remedy="Write set=scale.max=8.")
    return key, value

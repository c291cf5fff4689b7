"""Serves the route that deploys: a folder on the gateway's machine, or an uploaded archive.

A client that accepts server-sent events gets the progress: `function` once the function is known, `step` when a step
begins and when it ends, `note` when a step takes long, and at the end `completed` with the function's status, or
`error`. Other clients get one answer, at the end of the deploy.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel, Field

from ....errors import CodeError, FolderUnseen, PilotflameError, SettingsError, UnsupportedMedia
from ....handlers.codec import JSON_TYPE
from ...ground.access.keys import Scope
from ...node.functions.deploy import Deployment
from ...node.functions.live import Live
from ...node.functions.progress import DeployNote, DeployProgress, DeployStep, DeployTarget
from ...node.functions.rollouts import Rollouts
from ...node.functions.status import Deployed
from ...node.packaging.code import identity
from ...node.packaging.reuse import FileDigests, ReusedRevision
from ..http.audit import note
from ..http.event_stream import EVENTS, HEARTBEAT, HEARTBEAT_S, STREAM_HEADERS, accepts_events, event
from ..http.parsed_bodies import parsed
from ..http.requests import caller_of, load_json, media_type_of, read_body, validate
from ..http.responses import json_response
from ..http.routes import Flag, Parameter, Route

MAX_ARCHIVE_BYTES = 256 << 20
UPLOAD_TIMEOUT_S = 600.0
MAX_DIGESTS_BYTES = 16 << 20
DIGESTS_REMEDY = 'Send {"files": [{"path": "handler.py", "sha256": "…", "executable": false}]}.'
DEPLOY_REMEDY = 'Send {"path": "/folder"} as application/json, or a tar.gz as application/gzip.'
ARCHIVE_REMEDY = "Put weights in a snapshot folder, which is not uploaded."
ARCHIVE_TYPES = ("application/gzip", "application/x-gzip", "application/octet-stream")
SET = Parameter("set", "Of an upload: settings, as scale.max=8.", type="array", items={"type": "string"})
FOLDER = Parameter(
    "folder", "Of an upload: the folder's name, which is the function's if no setting names it."
)
BASE = Parameter(
    "base", "Of an upload: FUNCTION/REVISION, the live revision whose files it reuses, as `lacking` told."
)
INSTALL = Flag("install", "Of an upload: install its requirements.")
CHECK = Flag("check", "Of an upload: start a worker before the function goes live.", default=True)

# The names of the events.
_NAMES: dict[type[BaseModel], str] = {DeployTarget: "function", DeployStep: "step", DeployNote: "note"}


class DeployRequest(BaseModel, frozen=True, extra="forbid"):
    """A deploy of a folder on the gateway's machine."""

    path: Path
    seen_as: str = Field(
        "",
        max_length=64,
        description="The folder's identity as the client sees it. The gateway must see the same.",
    )
    overrides: dict[str, Any] = Field(default_factory=dict, description="Dotted settings, as scale.max.")
    install: bool = False
    check: bool = True


class Deploys:
    """The route that deploys functions."""

    def __init__(self, rollouts: Rollouts, check_disk: Callable[[], None], *, local: bool) -> None:
        """`check_disk` raises an error if the disk has too little free space for a deploy. It blocks its thread.
        `local` is True if only this machine can reach the gateway. Callers may deploy folders by path only if
        `local` is True.
        """
        self._rollouts, self._check_disk = rollouts, check_disk
        self._local = local

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST", "/v1/functions", self.deploy, Scope.DEPLOY, "Deploy a folder or a tar.gz.", Deployed, 201,
                parameters=(SET, FOLDER, BASE, INSTALL, CHECK), body={JSON_TYPE: DeployRequest, "application/gzip": bytes},
                other_responses={200: EVENTS}, errors=(400, 408, 409, 413, 415, 422, 500, 502, 503, 507),
            ),
            Route(
                "POST", "/v1/functions/{function}/lacking", self.lacking, Scope.DEPLOY,
                "Tell which files of an upload the live revision lacks.", {"revision": str, "lacking": list[str]},
                body=FileDigests, errors=(400, 404, 408, 413, 422, 503), reads=True,
            ),
        ]  # fmt: skip

    async def deploy(self, request: web.Request) -> web.StreamResponse:
        if accepts_events(request):
            return await self._stream(request)
        progress = DeployProgress()
        live = await self._deploy(request, await self._deployment(request, progress), progress)
        return json_response(_deployed(live, progress).model_dump(mode="json"), status=201)

    async def lacking(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, MAX_DIGESTS_BYTES, UPLOAD_TIMEOUT_S)
        wanted = await parsed(
            request, body, lambda body: validate(FileDigests, load_json(body), DIGESTS_REMEDY)
        )
        revision, lacking = await self._rollouts.lacking(
            request.match_info["function"], wanted, caller_of(request).owner
        )
        return json_response({"revision": revision, "lacking": lacking})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[bytes]()

        def tell(name: str, told: BaseModel) -> None:
            # Threads of the deploy report some events, and the event loop reports the others. Pass all events through
            # `call_soon_threadsafe`, which keeps the order of the events.
            loop.call_soon_threadsafe(events.put_nowait, event(name, told.model_dump_json().encode()))

        progress = DeployProgress(lambda change: tell(_NAMES[type(change)], change))
        # An error in the request itself is raised here, before the stream begins. So its response has the error's own
        # status.
        deployment = await self._deployment(request, progress)
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)

        async def run() -> None:
            try:
                live = await self._deploy(request, deployment, progress)
                tell("completed", _deployed(live, progress))
            except PilotflameError as error:
                note(request, outcome=f"{error.status} {error.code}")
                loop.call_soon_threadsafe(
                    events.put_nowait, event("error", orjson.dumps(error.whole.to_wire(private=True)))
                )
            loop.call_soon_threadsafe(events.put_nowait, b"")

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run())
            while data := await _next(events):
                # If the client has left, aiohttp cancels this handler, and so the deploy.
                with contextlib.suppress(ConnectionResetError):
                    await response.write(data)
        await response.write_eof()
        return response

    async def _deploy(self, request: web.Request, deployment: Deployment, progress: DeployProgress) -> Live:
        caller = caller_of(request)
        deployment = replace(
            deployment, authorize=functools.partial(self._rollouts.functions.check_owner, caller), owner=caller.owner,
            deployer=caller.name,
        )  # fmt: skip
        try:
            live = await self._rollouts.deploy(deployment, progress)
        except PilotflameError:
            # Log the function's name only if it is known: after the gateway has checked that the caller may deploy a
            # function of this name.
            if progress.target is not None:
                note(request, function=progress.target.name)
            raise
        note(request, function=live.record.function, revision=live.record.revision)
        return live

    async def _deployment(self, request: web.Request, progress: DeployProgress) -> Deployment:
        # Do not use `request.content_type`. If the request has no Content-Type, which any web page can arrange, aiohttp
        # returns application/octet-stream, and the gateway would accept the body as an archive.
        kind = media_type_of(request.headers)
        await asyncio.to_thread(self._check_disk)
        if kind in ARCHIVE_TYPES:
            return await _upload(request, progress)
        if kind != JSON_TYPE:
            raise UnsupportedMedia(f"A deploy cannot be of type {kind[:64]!r}.", remedy=DEPLOY_REMEDY)
        body = await read_body(request, MAX_ARCHIVE_BYTES, UPLOAD_TIMEOUT_S)
        wanted = await parsed(
            request, body, lambda body: validate(DeployRequest, load_json(body), DEPLOY_REMEDY)
        )
        if wanted.seen_as and not (self._local and await _sees(wanted)):
            message = f"This gateway does not see the folder that its client sees at {wanted.path}."
            raise FolderUnseen(message, remedy="Upload the folder: pilotflame deploy --upload.")
        if not self._local:
            remedy = "Upload the folder: pilotflame deploy --upload."
            message = "This gateway takes no folders by path: it listens beyond its machine."
            raise CodeError(message, remedy=remedy)
        return Deployment(
            path=wanted.path, overrides=wanted.overrides, install=wanted.install, check=wanted.check
        )


async def _sees(wanted: DeployRequest) -> bool:
    return await asyncio.to_thread(identity, wanted.path) == wanted.seen_as


async def _upload(request: web.Request, progress: DeployProgress) -> Deployment:
    overrides = dict(_pair(text) for text in request.query.getall(SET.name, []))
    install, check = INSTALL.read(request), CHECK.read(request)
    with progress.step("upload"):
        body = await read_body(request, MAX_ARCHIVE_BYTES, UPLOAD_TIMEOUT_S, remedy=ARCHIVE_REMEDY)
    folder_name, base = request.query.get(FOLDER.name, ""), request.query.get(BASE.name)
    return Deployment(
        archive=body,
        folder_name=folder_name,
        base=ReusedRevision.parse(base) if base else None,
        overrides=overrides,
        install=install,
        check=check,
    )


async def _next(events: asyncio.Queue[bytes]) -> bytes:
    """Return the next event, or a comment if no event comes within HEARTBEAT_S. After the last event, return b""."""
    try:
        async with asyncio.timeout(HEARTBEAT_S):
            return await events.get()
    except TimeoutError:
        return HEARTBEAT


def _deployed(live: Live, progress: DeployProgress) -> Deployed:
    replaces = progress.target.replaces if progress.target is not None else None
    return Deployed(**dict(live.status()), replaces=replaces, steps=progress.steps)


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(f"set={text[:80]!r} is not key=value.", remedy="Write set=scale.max=8.")
    return key, value

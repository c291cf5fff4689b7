"""The control routes: deploy, list, status, logs, delete, warm up; health, metrics, description."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import BadInput, CodeError, InputTooLarge, SettingsError, UnsupportedMedia
from ..access.caller import caller_of
from ..functions.deploy import Deployment
from ..functions.live import FunctionStatus
from ..functions.registry import Functions
from ..telemetry.metrics import Metrics
from .openapi import MAX_LOG_LINES, describe
from .requests import media_type_of, read_body
from .responses import typed

MAX_ARCHIVE_BYTES = 256 << 20
UPLOAD_TIMEOUT_S = 600.0
MAX_DIGITS = 9
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class DeployRequest(BaseModel):
    """The JSON of a deploy that points at a folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    overrides: dict[str, Any] = Field(default_factory=dict)
    install: bool = False
    check: bool = True


class Admin:
    """Routes of control. `local` allows pointing at folders of this node: only where the callers are on it."""

    def __init__(self, functions: Functions, metrics: Metrics, *, local: bool) -> None:
        self._functions = functions
        self._metrics = metrics
        self._local = local
        self.draining = False

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/functions", typed(self.deploy)),
            web.get("/v1/functions", typed(self.list)),
            web.get("/v1/functions/{function}", typed(self.status)),
            web.delete("/v1/functions/{function}", typed(self.delete)),
            web.get("/v1/functions/{function}/logs", typed(self.logs)),
            web.post("/v2/{function}/warmup", typed(self.warmup)),
            web.get("/healthz", self.health),
            web.get("/readyz", self.ready),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    async def deploy(self, request: web.Request) -> web.StreamResponse:
        live = await self._functions.deploy(
            replace(await self._order(request), authorize=caller_of(request).check_deploy)
        )
        return _json(live.status(), 201)

    async def list(self, request: web.Request) -> web.StreamResponse:
        functions = [status.model_dump(mode="json") for status in self._statuses(request)]
        return web.json_response({"functions": functions})

    async def status(self, request: web.Request) -> web.StreamResponse:
        live = self._functions.get(request.match_info["function"])
        processes = await live.processes() if _flag(request, "memory") else None
        return _json(live.status(processes))

    async def delete(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        await self._functions.delete(name)
        return web.json_response({"deleted": name})

    async def warmup(self, request: web.Request) -> web.StreamResponse:
        live = self._functions.get(request.match_info["function"])
        live.revision.warm(_number(request, "workers", 1, live.record.settings.scale.max))
        return web.json_response({"workers": live.status().workers.model_dump()})

    async def logs(self, request: web.Request) -> web.StreamResponse:
        book = self._functions.get(request.match_info["function"]).logs
        count, follow = _number(request, "lines", 100, MAX_LOG_LINES), _flag(request, "follow")
        response = web.StreamResponse(
            headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        if not follow:
            for line in book.tail(count):
                await response.write(orjson.dumps(line._asdict()) + b"\n")
            return response
        async for line in book.follow(count):
            await response.write(orjson.dumps(line._asdict()) + b"\n")
        return response

    async def health(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "alive"})

    async def ready(self, _request: web.Request) -> web.StreamResponse:
        if self.draining:
            return web.json_response({"status": "draining"}, status=503, headers={"Retry-After": "5"})
        return web.json_response({"status": "ready"})

    async def metrics(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            describe(self._statuses(request)), dumps=lambda value: orjson.dumps(value).decode()
        )

    def _statuses(self, request: web.Request) -> Iterator[FunctionStatus]:
        """Of the functions that the caller may know of."""
        caller = caller_of(request)
        return (live.status() for live in self._functions.all() if caller.allows(live.record.function))

    async def _order(self, request: web.Request) -> Deployment:
        if (request.content_length or 0) > MAX_ARCHIVE_BYTES:
            raise _archive_too_large()
        # aiohttp's `content_type` would take a body that says nothing for an archive: any web page can send that.
        kind = media_type_of(request.headers)
        if kind in ("application/gzip", "application/x-gzip", "application/octet-stream"):
            overrides = dict(_pair(text) for text in request.query.getall("set", []))
            return Deployment(
                archive=await _body(request), overrides=overrides,
                install=_flag(request, "install"), check=_flag(request, "check", default=True),
            )  # fmt: skip
        if kind != "application/json":
            raise UnsupportedMedia(
                f"A deploy cannot be {kind[:64]!r}." if kind else "A deploy must say its Content-Type.",
                remedy='Send {"path": "/folder"} as application/json, or a tar.gz as application/gzip.',
            )
        try:
            order = DeployRequest.model_validate_json(await _body(request))
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(str(step) for step in problem["loc"]) or "body"
            raise BadInput(
                f"The deploy request cannot be taken: {where}: {problem['msg']}.",
                remedy='Send {"path": "/folder"}, or a tar.gz with Content-Type application/gzip.',
            ) from None
        if not self._local:
            raise CodeError(
                "This gateway listens beyond this machine, so it does not read folders by path.",
                remedy="Upload the folder: pilotflame deploy --upload.",
            )
        return Deployment(
            path=order.path, overrides=order.overrides, install=order.install, check=order.check
        )


async def _body(request: web.Request) -> bytes:
    try:
        return await read_body(request, MAX_ARCHIVE_BYTES, UPLOAD_TIMEOUT_S)
    except InputTooLarge:
        raise _archive_too_large() from None


def _archive_too_large() -> InputTooLarge:
    return InputTooLarge(
        f"The archive is larger than {MAX_ARCHIVE_BYTES >> 20} MiB.",
        remedy="Put weights in a snapshot folder, which is not uploaded.",
    )


def _json(status: FunctionStatus, code: int = 200) -> web.Response:
    return web.Response(text=status.model_dump_json(), status=code, content_type="application/json")


def _flag(request: web.Request, name: str, *, default: bool = False) -> bool:
    text = request.query.get(name)
    if text is None:
        return default
    if text.lower() in ("1", "true", "yes"):
        return True
    if text.lower() in ("0", "false", "no", ""):
        return False
    raise BadInput(f"{name} is {text[:40]!r}.", remedy="It must be 1 or 0.")


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > MAX_DIGITS or int(text) > most:
        raise BadInput(f"{name} is {text[:40]!r}.", remedy=f"It must be a whole number from 0 to {most}.")
    return int(text)


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(
            f"set={text[:80]!r} is not key=value.", remedy="Write for example set=scale.max=8."
        )
    return key, value

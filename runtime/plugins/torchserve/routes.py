"""The routes of TorchServe's inference API, below /torchserve. A model is a function, and its version the number of the live revision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from aiohttp import web

from ....errors import NotSupported, UnknownFunction
from ....handlers.codec import BYTES_TYPE, JSON_TYPE
from ...front.api.backend import Backend
from ...front.api.invoke import Invoker
from ...front.api.plugin import BARE, ApiPlugin
from ...front.http.guard import KEY_HEADERS
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import content_type_of, id_of, load_output, media_type_of
from ...front.http.responses import json_response
from ...front.http.routes import Parameter, Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from .dialect import DIALECT
from .errors import ERRORS
from .management import ManagementApi

PREDICT = "/predictions/{function}"
VERSION = Parameter("version", "The number of the live revision.", place="path")
SECRET_HEADERS = KEY_HEADERS | {"cookie", "proxy-authorization", "x-api-key"}
"""The headers of a request that its handler does not get, because they may hold credentials."""
TEXT_TYPE = "text/plain; charset=utf-8"


class TorchServeApi(ApiPlugin):
    """The routes of predictions and models. A gateway with one function also has /ping and /predictions/{function} without the base."""

    base: ClassVar = "/torchserve"

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._management = ManagementApi(backend)

    def routes(self) -> Sequence[Route]:
        refused: dict[str, Any] = {"errors": (404, 405), **ERRORS}
        explain = "/explanations/{function}"
        return [
            *self.bare_routes(),
            self._row("PUT", PREDICT),
            *(self._row(method, f"{PREDICT}/{{version}}", VERSION) for method in ("POST", "PUT")),
            Route("POST", explain, self.refuse, Scope.INVOKE, "Not supported.", **refused),
            *self._management.routes(),
        ]

    def bare_routes(self) -> Sequence[Route]:
        """Return the routes that a gateway with one function also has without the base."""
        summary = "Show that the gateway runs."
        return [
            Route("GET", "/ping", self.ping, None, summary, {"status": str}, errors=(), **ERRORS),
            self._row("POST", PREDICT),
        ]

    def _row(self, method: str, path: str, *parameters: Parameter) -> Route:
        return Route(
            method, path, self.predict, Scope.INVOKE, "Call a function as TorchServe's clients do.", {JSON_TYPE: Any, "*/*": Any},
            body=Any, body_required=False, parameters=parameters, errors=(400, 404, 408, 413, 500, 503, 504, 507), **ERRORS,
        )  # fmt: skip

    async def ping(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"status": "Healthy"})

    async def predict(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        live_version(self.backend, request)
        _, body = await self.backend.read_body(request, name)
        # Check the version again, because a deploy may have replaced it while the body arrived.
        live = live_version(self.backend, request)
        extra, kind = {**BARE, "torchserve": _facts(request)}, _type_for(live, request)
        payload, kind = await Invoker(self.backend).call(request, name, body, extra=extra, content_type=kind)
        # Send text without the quotes of JSON, as TorchServe does.
        if kind == JSON_TYPE and payload.startswith(b'"'):
            payload = await parsed(request, payload, lambda text: load_output(text).encode(), called=True)
            kind = TEXT_TYPE
        return web.Response(body=payload, headers={"X-Request-Id": id_of(request), "Content-Type": kind})

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        name = self.backend.functions.get(request.match_info["function"]).record.function
        message = "pilotflame does not support explanations."
        raise NotSupported(message, remedy=f"Deploy the explainer as a function beside {name}.")


def live_version(backend: Backend, request: web.Request) -> Live:
    """Return the function in the path. Raise UnknownFunction if the path has another version."""
    live, version = backend.functions.get(request.match_info["function"]), request.match_info.get("version")
    if version not in (None, str(live.record.number)):
        name = live.record.function
        raise UnknownFunction(f"Model version: {str(version)[:64]} does not exist for model: {name}")
    return live


def _facts(request: web.Request) -> dict[str, Any]:
    """Return what a handler of TorchServe gets beside the body."""
    # A header may have bytes that are not UTF-8.
    headers = {key.lower(): value.encode(errors="replace").decode() for key, value in request.headers.items()}
    return {
        "content_type": request.headers.get("Content-Type", ""), "query": dict(request.query),
        "headers": {key: value for key, value in headers.items() if key not in SECRET_HEADERS},
    }  # fmt: skip


def _type_for(live: Live, request: web.Request) -> str:
    """Return the content type with which a worker decodes the body. TorchServe's handlers get bytes unless the body is JSON or text."""
    kind = media_type_of(request.headers)
    if live.record.handler.get("dialect") != DIALECT.name or kind.startswith("text/"):
        return content_type_of(request.headers)
    return "" if kind == JSON_TYPE else BYTES_TYPE

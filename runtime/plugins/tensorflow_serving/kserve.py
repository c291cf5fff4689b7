"""The routes of the first version of KServe's protocol, below /kserve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from aiohttp import web

from ....errors import BadInput, FunctionStopped, NotSupported
from ...front.api.plugin import ApiPlugin, list_response
from ...front.http.responses import json_response
from ...front.http.routes import Route
from ...ground.access.keys import Scope
from .errors import KSERVE_ERRORS

MODEL = "/v1/models/{function}"
KEYS = ("instances", "inputs")
REMEDY = 'Send {"instances": [...]}.'


class KserveApi(ApiPlugin):
    """The routes of models. Without the base, there is only the route `predict`, which `TensorFlowServingApi` provides."""

    base: ClassVar = "/kserve"

    def routes(self) -> Sequence[Route]:
        known: dict[str, Any] = {"errors": (404, 503), **KSERVE_ERRORS}
        predicts: dict[str, Any] = {
            "body": {"instances?": list[Any], "inputs?": list[Any]},
            "errors": (400, 404, 429, 500, 503, 504),
            **KSERVE_ERRORS,
        }
        ready = {"name": str, "ready": bool}
        return [
            # The client of the package kserve adds the slash.
            *(Route("GET", path, self.alive, None, "Show that the gateway runs.", {"status": str}, errors=(), **KSERVE_ERRORS) for path in ("", "/")),
            Route("GET", "/v1/models", self.models, Scope.INVOKE, "List the functions.", {"models": list[str]}, errors=(), **KSERVE_ERRORS),
            Route("GET", MODEL, self.ready, Scope.INVOKE, "Show whether a function can be called.", ready, **known),
            Route("POST", f"{MODEL}:predict", self.predict, Scope.INVOKE, "Call a function for each instance.", {"predictions": list[Any]}, **predicts),
            Route("POST", f"{MODEL}:explain", self.explain, Scope.INVOKE, "Not supported.", errors=(404, 501), **KSERVE_ERRORS),
        ]  # fmt: skip

    def bare_routes(self) -> Sequence[Route]:
        return ()

    async def alive(self, _request: web.Request) -> web.StreamResponse:
        return json_response({"status": "alive"})

    async def models(self, request: web.Request) -> web.StreamResponse:
        return json_response({"models": self.backend.names(request)})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["function"]
        if why := self.backend.functions.get(name).unavailable:
            raise FunctionStopped(f"Model with name {name} is not ready. {why}")
        return json_response({"name": name, "ready": True})

    async def predict(self, request: web.Request) -> web.StreamResponse:
        name, body = request.match_info["function"], await self.read_json(request)
        key, events = _events(body)
        outputs = await self.call_each(request, name, events, key)
        return await list_response(request, "predictions", outputs)

    async def explain(self, request: web.Request) -> web.StreamResponse:
        name = self.backend.functions.get(request.match_info["function"]).record.function
        message = "pilotflame does not support explain: a function has no explainer."
        raise NotSupported(message, remedy=f"Call {name}:predict, or deploy the explainer as a function.")


def _events(body: Any) -> tuple[str, list[Any]]:
    """Return the key of the instances, and the instances. Raise BadInput if a key is unknown, missing or not a list."""
    if not isinstance(body, dict):
        raise BadInput("The body is not a JSON object.", remedy=REMEDY)
    if unknown := sorted(body.keys() - set(KEYS)):
        fault = (
            f"pilotflame does not support the key {unknown[0][:64]!r}: a function gets only the instances."
        )
        raise BadInput(fault, remedy="Put the value into each instance.")
    if len(body) != 1:
        raise BadInput('Expected one of "instances" and "inputs".', remedy=REMEDY)
    key, events = next(iter(body.items()))
    if not isinstance(events, list):
        raise BadInput(f'Expected "{key}" to be a list.', remedy=REMEDY)
    return key, events

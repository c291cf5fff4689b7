"""The routes of Vertex AI's endpoints, below /vertex, and those of its containers.

An endpoint is a function, and any project and location are accepted. The environment of a container names its two routes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NotRequired

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from ....errors import (
    BadInput,
    FunctionStopped,
    GatewayError,
    NotSupported,
    PilotflameError,
    UnknownFunction,
    UnknownRoute,
)
from ....handlers.codec import JSON_TYPE
from ...front.api.invoke import Invoker
from ...front.api.plugin import BARE, ApiPlugin, list_response
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import content_type_of, id_of, load_json
from ...front.http.responses import Response, error_reply
from ...front.http.routes import Parameter, Route
from ...ground.access.keys import Scope

ENDPOINT = "/v1/projects/{project}/locations/{location}/endpoints/{function}"
PARAMETERS = tuple(
    Parameter(name, "Any name.", place="path", type="string", pattern="^[A-Za-z0-9._-]{1,63}$")
    for name in ("project", "location")
)
HEALTH_ROUTE, PREDICT_ROUTE = "AIP_HEALTH_ROUTE", "AIP_PREDICT_ROUTE"
REFUSED = ("explain", "streamRawPredict", "directPredict", "directRawPredict", "serverStreamingPredict")
VERB = Parameter("verb", place="path", type="string", enum=list(REFUSED))
KEYS = frozenset({"instances", "parameters"})
REMEDY = 'Send {"instances": [...]}, and "parameters" beside it or not.'
_NAMES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED",
    429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED",
}  # fmt: skip
"""The statuses of Google's APIs, and their names."""
_OTHERS = {405: 404, 408: 504, 502: 503, 507: 503}


class VertexErrorFields(TypedDict):
    """The fields of an error, as all APIs of Google have them."""

    code: int
    message: str
    status: str


class VertexError(TypedDict):
    """The body of every error."""

    error: VertexErrorFields


class VertexPredictions(TypedDict):
    """The outputs of a function in the order of the instances. A container's answer has only the predictions."""

    predictions: list[Any]
    deployedModelId: NotRequired[str]
    model: NotRequired[str]
    modelDisplayName: NotRequired[str]
    modelVersionId: NotRequired[str]


def vertex_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error."""
    status = _OTHERS.get(error.status, error.status)
    status = status if status in _NAMES else 500 if status >= 500 else 400
    message = str(error)
    if isinstance(error, UnknownFunction) and error.name:
        message = f"Endpoint `{error.name}` not found."
    body = VertexError(error={"code": status, "message": message, "status": _NAMES[status]})
    return error_reply(error, request_id)._replace(status=status, body=orjson.dumps(body))


ERRORS: dict[str, Any] = {"error_format": vertex_error, "error_type": VertexError}


class VertexApi(ApiPlugin):
    """The routes of endpoints, and, if the gateway serves one function, those that the environment of a container names."""

    base: ClassVar = "/vertex"

    def routes(self) -> Sequence[Route]:
        shared: dict[str, Any] = {
            "parameters": PARAMETERS,
            "errors": (400, 404, 429, 500, 503, 504),
            **ERRORS,
        }
        body = {"instances": list[Any], "parameters?": Any}
        call, other = Scope.INVOKE, {**shared, "errors": (404, 501), "parameters": (*PARAMETERS, VERB)}
        return [
            Route("POST", f"{ENDPOINT}:predict", self.predict, call, "Call a function for each instance.", VertexPredictions, body=body, **shared),
            Route("POST", f"{ENDPOINT}:rawPredict", self.predict_raw, call, "Call a function with the body.", {JSON_TYPE: Any, "*/*": Any}, body=Any, body_required=False, **shared),
            Route("POST", f"{ENDPOINT}:{{verb}}", self.refuse, call, "Not supported.", **other),
        ]  # fmt: skip

    def bare_routes(self) -> Sequence[Route]:
        """Return the routes that Vertex AI names in a container's environment. Raise GatewayError if one is no path."""
        health, predict = (_route_in(name) for name in (HEALTH_ROUTE, PREDICT_ROUTE))
        found = []
        # Routes of other platforms may have the same paths. `accepts` lets these rows precede rows without it.
        if health:
            found.append(Route("GET", health, self.health, None, "Show the health of the only function.", errors=(404, 422, 503), accepts=_any))  # fmt: skip
        if predict:
            found.append(Route("POST", predict, self.predict_only, Scope.INVOKE, "Call the only function for each instance.", VertexPredictions, body={"instances": list[Any]}, errors=(400, 404, 408, 413, 422, 429, 500, 503, 504), accepts=_any))  # fmt: skip
        return found

    async def health(self, request: web.Request) -> web.StreamResponse:
        if why := self.backend.only(request).unavailable:
            raise FunctionStopped(why)
        return web.Response()

    async def predict(self, request: web.Request) -> web.StreamResponse:
        named = request.match_info
        outputs = await self._predictions(request, named["function"])
        record = self.backend.functions.get(named["function"]).record
        place = f"projects/{named['project']}/locations/{named['location']}"
        others = {
            "deployedModelId": record.revision, "model": f"{place}/models/{record.function}",
            "modelDisplayName": record.function, "modelVersionId": str(record.number),
        }  # fmt: skip
        return await list_response(request, "predictions", outputs, others)

    async def predict_only(self, request: web.Request) -> web.StreamResponse:
        outputs = await self._predictions(request, self.backend.only(request).record.function)
        return await list_response(request, "predictions", outputs)

    async def predict_raw(self, request: web.Request) -> web.StreamResponse:
        name, kind = request.match_info["function"], content_type_of(request.headers)
        live, body = await self.backend.read_body(request, name)
        if not kind:
            await parsed(request, body, load_json)
        payload, kind = await Invoker(self.backend).call(request, name, body, extra=BARE, content_type=kind)
        headers = {
            "X-Request-Id": id_of(request), "X-Vertex-AI-Endpoint-Id": name, "X-Vertex-AI-Deployed-Model-Id": live.record.revision,
            "Content-Type": kind,
        }  # fmt: skip
        return web.Response(body=payload, headers=headers)

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        name, verb = request.match_info["function"], request.match_info["verb"]
        self.backend.functions.get(name)
        if verb not in REFUSED:
            raise UnknownRoute(
                f"Endpoints have no method {verb[:64]!r}.", remedy="Call :predict or :rawPredict."
            )
        raise NotSupported(
            f"pilotflame does not support {verb}.", remedy=f"Call {name}:predict or {name}:rawPredict."
        )

    async def _predictions(self, request: web.Request, function: str) -> list[bytes]:
        """Call the function for each instance of the body, which may have parameters for all. Return the outputs."""
        _, body = await self.backend.read_body(request, function)
        instances, extra = await parsed(request, body, lambda body: _asked(load_json(body)))
        return await self.call_each(request, function, instances, "instances", extra)


def _asked(body: Any) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the instances, and what the handler finds in `context.extra`. Raise BadInput if the body has other fields or no
    instances.
    """
    if not isinstance(body, dict):
        raise BadInput("The body is not a JSON object.", remedy=REMEDY)
    if unknown := sorted(body.keys() - KEYS):
        message = f'Invalid JSON payload received. Unknown name "{unknown[0][:64]}": Cannot find field.'
        raise BadInput(message, remedy=REMEDY, details={"field": unknown[0][:64]})
    if not isinstance(instances := body.get("instances"), list) or not instances:
        raise BadInput("instances: it must be a list with at least one instance.", remedy=REMEDY)
    parameters = body.get("parameters")
    return instances, BARE if parameters is None else {**BARE, "parameters": parameters}


def _route_in(name: str) -> str:
    """Return the path in a variable of the environment; "" if the variable is not set."""
    path = os.environ.get(name, "")
    if path and (not path.startswith("/") or "{" in path):
        raise GatewayError(f"{name} is {path[:80]!r}, which is no path.", remedy="Write it as /predict.")
    return path


def _any(_headers: Mapping[str, str]) -> bool:
    return True

"""The routes of TensorFlow Serving's REST API, below /tensorflow-serving.

A model is a function, and its version is the number of the live revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson
from aiohttp import web

from ....errors import BadInput, NotSupported, UnknownFunction, UnknownRoute
from ...front.api.plugin import BARE, ApiPlugin, list_response
from ...front.http.requests import id_of, load_output
from ...front.http.responses import json_response, outputs_response
from ...front.http.routes import Parameter, Route
from ...ground.access.keys import Scope
from ...node.functions.live import Live
from .errors import SERVING_ERRORS
from .models import SIGNATURE, ModelMetadata, ModelStatus, model_metadata, model_status

MODEL = "/v1/models/{function}"
VERSIONS = ("/versions/{version}", "/labels/{label}")
VERSION = Parameter(
    "version", "The number of the live revision.", place="path", type="string", pattern="^[0-9]{1,9}$"
)
LABEL = Parameter(
    "label",
    "A name in the function's setting `aliases`.",
    place="path",
    type="string",
    pattern="^[A-Za-z0-9_-]{1,64}$",
)
PREDICT_REMEDY = 'Send {"instances": [...]}, or {"inputs": ...} for one call with all inputs.'
PREDICTION = {"predictions?": list[Any], "outputs?": Any}
REFUSED = ("classify", "regress")
VERB = Parameter("verb", place="path", type="string", enum=list(REFUSED))
BODY = {"instances?": list[Any], "inputs?": Any, "signature_name?": str}


class TensorFlowServingApi(ApiPlugin):
    """The routes of models. A gateway with one function also has the routes of `predict` without the base."""

    base: ClassVar = "/tensorflow-serving"

    def routes(self) -> Sequence[Route]:
        shared: dict[str, Any] = {"errors": (400, 404, 503), **SERVING_ERRORS}
        found = list(self.bare_routes())
        for version, parameters in _places():
            path, more = f"{MODEL}{version}", shared | {"parameters": parameters}
            found += [
                Route("GET", path, self.status, Scope.INVOKE, "Show the state of a model.", ModelStatus, **more),
                Route("GET", f"{path}/metadata", self.metadata, Scope.INVOKE, "Show a model's signature.", ModelMetadata, **more),
                Route("POST", f"{path}:{{verb}}", self.refuse, Scope.INVOKE, "Not supported.", errors=(400, 404, 501), parameters=(*parameters, VERB), **SERVING_ERRORS),
            ]  # fmt: skip
        return found

    def bare_routes(self) -> Sequence[Route]:
        shared: dict[str, Any] = {
            "body": BODY,
            "errors": (400, 404, 429, 500, 503, 504),
            **SERVING_ERRORS,
        }
        return [
            Route("POST", f"{MODEL}{version}:predict", self.predict, Scope.INVOKE, "Call a function for each instance.", PREDICTION, parameters=parameters, **shared)
            for version, parameters in _places()
        ]  # fmt: skip

    async def status(self, request: web.Request) -> web.StreamResponse:
        return json_response(model_status(self._live(request)))

    async def metadata(self, request: web.Request) -> web.StreamResponse:
        return json_response(model_metadata(self._live(request)))

    async def predict(self, request: web.Request) -> web.StreamResponse:
        function, body = self._live(request).record.function, await self.read_json(request)
        # Check the version again, because a deploy may have replaced it while the body arrived.
        self._live(request)
        check_signature(body)
        if "inputs" not in body:
            outputs = await self.call_each(request, function, instances_of(body), "instances")
            return await list_response(request, "predictions", outputs)
        if "instances" in body:
            fault = "Not formatted correctly expecting only one of 'inputs' or 'instances' keys to exist"
            raise BadInput(fault, remedy="Send one of them.")
        output = await self.call(request, function, body["inputs"], extra=BARE, read=_checked)
        headers = {"X-Request-Id": id_of(request)}
        return await outputs_response(
            request, len(output), lambda: {"outputs": orjson.Fragment(output)}, headers=headers
        )

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        name, verb = self._live(request).record.function, request.match_info["verb"]
        if verb not in REFUSED:
            raise UnknownRoute(f"Models have no method {verb[:64]!r}.", remedy="Call predict.")
        message = (
            f"pilotflame does not support {verb}: a handler has no TensorFlow examples and no class scores."
        )
        raise NotSupported(message, remedy=f"Call {name}:predict.")

    def _live(self, request: web.Request) -> Live:
        """Return the function that the path names. Raise UnknownFunction if the path has another version, and BadInput for an unknown label."""
        named, name = request.match_info, request.match_info["function"]
        live = self.backend.functions.get(name)
        if (version := named.get("version")) not in (None, str(live.record.number)):
            raise UnknownFunction(f"Servable not found for request: Specific({name}, {str(version)[:64]})")
        if (label := named.get("label")) is not None and label not in live.record.settings.aliases:
            raise BadInput(f"Unrecognized servable version label: {label[:64]}")
        return live


def instances_of(body: Any) -> list[Any]:
    """Return the instances of a request. Raise BadInput if there are none."""
    if not isinstance(body, dict) or "instances" not in body:
        raise BadInput("Missing 'inputs' or 'instances' key.", remedy=PREDICT_REMEDY)
    if not isinstance(found := body["instances"], list):
        raise BadInput("Expecting 'instances' to be a list.", remedy=PREDICT_REMEDY)
    if not found:
        raise BadInput("No values in 'instances' array.", remedy="Send at least one instance.")
    return found


def check_signature(body: Any) -> None:
    """Raise BadInput unless the body is an object that names no signature, or names SIGNATURE."""
    if not isinstance(body, dict):
        raise BadInput("The body is not a JSON object.", remedy=PREDICT_REMEDY)
    named = body.get("signature_name", "")
    if not isinstance(named, str):
        raise BadInput(
            "'signature_name' key must be a string value.", remedy=f"Omit it, or send {SIGNATURE!r}."
        )
    if named not in ("", SIGNATURE):
        fault = f'Serving signature name: "{named[:64]}" not found in signature def.'
        raise BadInput(fault, remedy=f"A function has only {SIGNATURE!r}.")


def _checked(output: bytes) -> bytes:
    """Return an output as it is. Raise the errors of `load_output`."""
    load_output(output)
    return output


def _places() -> list[tuple[str, tuple[Parameter, ...]]]:
    """Return the parts of a path that may follow the name of a model, each with its parameters."""
    return [("", ()), (VERSIONS[0], (VERSION,)), (VERSIONS[1], (LABEL,))]

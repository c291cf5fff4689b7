"""Makes the OpenAPI document of a gateway from the route table, with a path of its own for each function."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from http import HTTPStatus
from typing import Any, NamedTuple

import orjson
from aiohttp import web

from ...._version import __version__
from ....errors import UnknownFunction
from ....handlers.arrays import NPY_TYPE, SAFETENSORS_TYPE
from ....handlers.codec import BYTES_TYPE, JSON_TYPE
from ...node.functions.status import FunctionStatus
from ..http.event_stream import EVENT_STREAM_TYPE
from ..http.responses import json_response
from ..http.route_types import REFERENCE, RouteTypes
from ..http.routes import INVOKE_PATH, Parameter, Route
from .plugin import ApiPlugin

FUNCTION = Parameter(
    "function", "Describe only this function. A plugin may describe it as its platform does."
)
MOST_LISTED_BYTES = 16 << 10
"""Limit for a function's schemas in the document of all functions, which omits longer schemas. `?function=NAME` returns them."""
_GUARD_ERRORS = (401, 403, 404, 429)
_SECURITY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer", "description": "An API key: pf_…"},
    "aws": {
        "type": "apiKey", "in": "header", "name": "Authorization",
        "description": "An AWS signature, version 4. The access key is the id of an API key, the secret its last part.",
    },
}  # fmt: skip
_INFO = {"title": "pilotflame", "version": __version__, "description": "Functions that start when called."}


class OpenApi:
    """The OpenAPI document, and the route that returns it. `routes` includes this route."""

    def __init__(
        self,
        routes: Sequence[Route],
        statuses: Callable[[web.Request], Iterable[FunctionStatus]],
        plugins: Sequence[ApiPlugin] = (),
    ) -> None:
        """`statuses` returns the functions that the caller of a request may see. `plugins` may change the document."""
        self._statuses, self._plugins = statuses, plugins
        self._described: dict[str, _Described] = {}
        names = {route.key_header for route in routes} - {""}
        self._key_headers = {name: {"type": "apiKey", "in": "header", "name": name} for name in sorted(names)}
        own = Route(
            "GET", "/openapi.json", self._respond, None, "Return this document.", dict[str, Any],
            errors=(404,), parameters=(FUNCTION,),
        )  # fmt: skip
        self.routes = [*routes, own]

    def document(self, functions: Iterable[FunctionStatus], *, named: bool = False) -> dict[str, Any]:
        """Return the document in the format OpenAPI 3.1, with the paths to invoke these functions and the changes of
        plugins. The descriptions of functions in the document are fragments of JSON.

        `named` is True if the caller asks for one function only.
        """
        paths, schemas = (dict(part) for part in self._static)
        found, invoked = list(functions), dict[str, Any]()
        if paths.pop(INVOKE_PATH, None):
            for function in found:
                described = self._describe(function)
                invoked[f"/invoke/{function.name}"] = described.path
                schemas |= described.components
        components = {"schemas": schemas, "securitySchemes": _SECURITY_SCHEMES | self._key_headers}
        document = {"openapi": "3.1.0", "info": _INFO, "paths": invoked | paths, "components": components}
        for plugin in self._plugins:
            document = plugin.describe(document, found, named=named)
        return document

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        # Build the static part in a thread. The first time, this takes a fifth of a second.
        await asyncio.to_thread(lambda: self._static)
        named = request.query.get(FUNCTION.name, "")
        found: list[FunctionStatus] = []
        for status in self._statuses(request):
            if named in ("", status.name):
                found.append(status if named or _is_short(status) else status.without_schemas())
                self._describe(found[-1])
            # Let other requests go on: there may be a thousand functions.
            await asyncio.sleep(0)
        if named and not found:
            raise UnknownFunction.named(named)
        if not named:
            self._described = {status.name: self._describe(status) for status in found}
        return json_response(self.document(found, named=bool(named)))

    def _describe(self, function: FunctionStatus) -> _Described:
        """Return the part of the document that describes a function. Build it again only if the function's revision,
        `streaming` or schemas have changed.
        """
        key = (function.revision, function.streaming, function.input_schema, function.output_schema)
        known = self._described.get(function.name)
        if known is None or known.key != key:
            schemas: dict[str, Any] = {}
            path = {"post": _invoke(self._static[0][INVOKE_PATH]["post"], function, schemas)}
            components = {name: orjson.Fragment(orjson.dumps(schema)) for name, schema in schemas.items()}
            known = _Described(key, orjson.Fragment(orjson.dumps(path)), components)
            self._described[function.name] = known
        return known

    @cached_property
    def _static(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The (paths, components) that depend neither on the deployed functions nor on the caller."""
        types = RouteTypes(self.routes)
        paths: dict[str, Any] = {}
        # Omit a row with the method "*": it serves the function's own API, which only the function can describe.
        for route in (route for route in self.routes if route.method != "*"):
            operations, method = paths.setdefault(route.path, {}), route.method.lower()
            operations[method] = _merge(operations.get(method, {}), _operation(route, types))
        # pydantic names components by their classes. Replace each name by the component's title, also in references.
        titles = {name: schema.get("title", name) for name, schema in types.components.items()}
        components = {titles[name]: schema for name, schema in types.components.items()}
        text = orjson.dumps([paths, components]).decode()
        for name, title in titles.items():
            text = text.replace(f'"{REFERENCE}{name}"', f'"{REFERENCE}{title}"')
        paths, components = orjson.loads(text)
        return paths, components


def _is_short(function: FunctionStatus) -> bool:
    return len(orjson.dumps([function.input_schema, function.output_schema])) <= MOST_LISTED_BYTES


class _Described(NamedTuple):
    """What describes a function: the path that invokes it, and the components of its schemas."""

    key: tuple[str, bool, dict[str, Any], dict[str, Any]]
    path: orjson.Fragment
    components: dict[str, orjson.Fragment]


def _operation(route: Route, types: RouteTypes) -> dict[str, Any]:
    specs = {parameter.name: parameter.spec for parameter in route.parameters}
    in_path = {name: Parameter(name, place="path").spec for name in re.findall(r"\{(\w+)\}", route.path)}
    operation: dict[str, Any] = {"summary": route.summary, "parameters": list((in_path | specs).values())}
    if route.body is not None:
        operation["requestBody"] = {"content": types.content(route.body, "validation")}
        if route.body_required:
            operation["requestBody"]["required"] = True
    errors = types.content(route.error_type, "serialization")
    statuses = set(route.errors) if route.public else {*route.errors, *_GUARD_ERRORS}
    refused = {"description": "A typed error.", "content": errors}
    responses: dict[str, Any] = dict.fromkeys(map(str, sorted(statuses)), refused)
    for status, body in {route.status: route.response, **route.other_responses}.items():
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if body is not None:
            response["content"] = types.content(body, "serialization")
        if route.headers:
            response["headers"] = route.headers
        responses[str(status)] = response
    operation["responses"] = responses
    if not route.public:
        others = ["aws"] * route.aws_signed + [route.key_header] * bool(route.key_header)
        operation["security"] = [{}, {"key": []}, *({name: []} for name in others)]
    return operation


def _merge(one: Any, other: Any) -> Any:
    """Return the union of two operations of the same method and path. Where they differ, `other` is used."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one | {key: _merge(one[key], value) if key in one else value for key, value in other.items()}
    if isinstance(one, list) and isinstance(other, list):
        return one + [item for item in other if item not in one]
    return other


def _invoke(operation: dict[str, Any], function: FunctionStatus, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the operation that invokes one function. Add the definitions inside its schemas to `schemas`."""
    taken = _hoist(f"{function.name}.input", function.input_schema, schemas)
    output = _hoist(f"{function.name}.output", function.output_schema, schemas)
    described = {
        **operation,
        "operationId": f"invoke_{function.name}",
        "summary": f"Call {function.name} ({function.revision}) and wait for its output.",
        "parameters": [one for one in operation["parameters"] if one["in"] != "path"],
        "requestBody": {"content": operation["requestBody"]["content"] | {JSON_TYPE: {"schema": taken}}},
    }
    success = operation["responses"]["200"]
    if function.streaming:
        content = {EVENT_STREAM_TYPE: success["content"][EVENT_STREAM_TYPE]}
    else:
        content = {JSON_TYPE: {"schema": output}}
        # A handler whose output is not annotated may also return text, bytes or arrays.
        if not function.output_schema:
            content |= {"text/plain": {"schema": {"type": "string"}}}
            content |= {media: {"schema": {}} for media in (BYTES_TYPE, NPY_TYPE, SAFETENSORS_TYPE)}
    return described | {"responses": {**operation["responses"], "200": {**success, "content": content}}}


def _hoist(name: str, schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` without its definitions, which few tools support.

    Move the definitions to `schemas`, as components of the document whose names begin with `name`.
    """
    text = orjson.dumps(schema).replace(b'"#/$defs/', f'"{REFERENCE}{name}.'.encode())
    moved: dict[str, Any] = orjson.loads(text)
    schemas.update({f"{name}.{key}": definition for key, definition in moved.pop("$defs", {}).items()})
    return moved

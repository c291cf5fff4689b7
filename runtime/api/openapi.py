"""The OpenAPI description of a gateway: its own routes, and each function's input and output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..._version import __version__
from ...handlers.arrays import NPY_TYPE, SAFETENSORS_TYPE
from ..dialects.described import EVENTS, spelled_paths, spelled_schemas
from ..dialects.runpod.openapi import queue_paths, queue_schemas
from ..functions.live import FunctionStatus
from .openapi_access import SECURITY_SCHEMES, access_paths, access_schemas, guarded
from .openapi_parts import errors, json_answer, query
from .openapi_webhooks import webhook_paths, webhook_schemas

ERROR = {"$ref": "#/components/schemas/Error"}
MAX_LOG_LINES = 10_000
_STATUS = {"$ref": "#/components/schemas/FunctionStatus"}
_TEXT = {"type": "string"}
_FLAG = {"type": "string", "enum": ["0", "1"]}
_SECONDS = {"type": "number", "exclusiveMinimum": 0}
_PRIORITY = {"type": "integer", "minimum": 1, "maximum": 5, "default": 3}
_THEIRS = (
    "grpc-timeout, x-envoy-expected-rq-timeout-ms and x-stainless-read-timeout (s) count too, where they make sense:"
    " the smallest wins, and never more than the function's timeout_s."
)
# What every answer of an invocation says in its header.
_ANSWERED = {
    "X-Request-Id": {"schema": _TEXT, "required": True},
    "X-Worker-Id": {"schema": _TEXT, "required": True},
    "X-Cold-Start": {"schema": {"type": "string", "enum": ["true", "false"]}, "required": True},
    "Server-Timing": {"schema": _TEXT, "required": True},
}


def describe(functions: Iterable[FunctionStatus]) -> dict[str, Any]:
    """OpenAPI 3.1, with one path a function."""
    schemas: dict[str, Any] = {"Error": _error_schema()}
    status = FunctionStatus.model_json_schema(
        mode="serialization", ref_template="#/components/schemas/{model}"
    )
    schemas.update(status.pop("$defs", {}))
    schemas["FunctionStatus"] = status
    paths = _control_paths()
    for function in functions:
        taken = _hoisted(f"{function.name}.input", function.input_schema, schemas)
        given = _hoisted(f"{function.name}.output", function.output_schema, schemas)
        paths[f"/invoke/{function.name}"] = {"post": _invoke(function, taken, given)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pilotflame",
            "version": __version__,
            "description": "Functions that start when called.",
        },
        "paths": guarded(
            paths | access_paths(ERROR) | queue_paths(ERROR) | spelled_paths(ERROR) | webhook_paths(ERROR),
            ERROR,
        ),
        "components": {
            "schemas": schemas | access_schemas() | queue_schemas() | spelled_schemas() | webhook_schemas(),
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


def _invoke(function: FunctionStatus, taken: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": given}}
    if function.streaming:
        answer = EVENTS
    elif (
        not function.output_schema
    ):  # not annotated: bytes are sent as what they are, arrays as Accept wants them
        answer |= {"text/plain": {"schema": {"type": "string"}}, "application/octet-stream": {"schema": {}}}
        answer |= {NPY_TYPE: {"schema": {}}, SAFETENSORS_TYPE: {"schema": {}}}
    return {
        "operationId": f"invoke_{function.name}",
        "summary": f"Calls {function.name} ({function.revision}) and waits for its answer.",
        "parameters": [
            _header("X-Request-Timeout", _SECONDS, f"Seconds until the answer must be there. {_THEIRS}"),
            _header(
                "X-Priority",
                _PRIORITY,
                "1 is served first, 5 last; without it 3. A key without the scope admin gets 3 at most.",
            ),
            _header("X-Scale-Up-Timeout", _SECONDS, "Seconds that it may wait for a worker."),
            _header("X-Request-Id", _TEXT, "1 to 128 visible ASCII characters; of others, one is made."),
            _header("traceparent", _TEXT, "A W3C trace context; the answer brings it back."),
        ],
        "requestBody": {"content": {"application/json": {"schema": taken}}},
        "responses": {
            "200": {"description": "The answer.", "headers": _ANSWERED, "content": answer},
            **errors(ERROR, 400, 408, 413, 422, 429, 500, 503, 504),
        },
    }


def _hoisted(name: str, schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """A pydantic schema whose definitions are the document's: few tools know schemas with definitions of their own."""
    inside, outside = "#/$defs/", f"#/components/schemas/{name}."

    def moved(node: Any) -> Any:
        if isinstance(node, list):
            return [moved(one) for one in node]
        if not isinstance(node, dict):
            return node
        found = {key: moved(value) for key, value in node.items()}
        if isinstance(reference := node.get("$ref"), str):
            found["$ref"] = reference.replace(inside, outside, 1)
        if isinstance(choice := node.get("discriminator"), dict) and isinstance(choice.get("mapping"), dict):
            mapping = {key: str(to).replace(inside, outside, 1) for key, to in choice["mapping"].items()}
            found["discriminator"] = {**choice, "mapping": mapping}
        return found

    for key, definition in schema.get("$defs", {}).items():
        schemas[f"{name}.{key}"] = moved(definition)
    hoisted: dict[str, Any] = moved({key: value for key, value in schema.items() if key != "$defs"})
    return hoisted


def _control_paths() -> dict[str, Any]:
    name = {"name": "function", "in": "path", "required": True, "schema": _TEXT}
    listing = {
        "type": "object",
        "required": ["functions"],
        "properties": {"functions": {"type": "array", "items": _STATUS}},
    }
    memory = query("memory", _FLAG, "Whether to tell its processes and what they hold.")
    look = {
        "summary": "Shows a function.",
        "parameters": [name, memory],
        "responses": {"200": json_answer("The function.", _STATUS), **errors(ERROR, 400, 404, 503)},
    }
    gone = {"type": "object", "required": ["deleted"], "properties": {"deleted": _TEXT}}
    delete = {
        "summary": "Deletes a function.",
        "parameters": [name],
        "responses": {"200": json_answer("Deleted.", gone), **errors(ERROR, 404, 503)},
    }
    ready = {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"enum": ["ready", "draining"]}},
    }
    return {
        "/v1/functions": {
            "get": {"summary": "Lists the functions.", "responses": {"200": json_answer("All functions.", listing)}},
            "post": _deploy(),
        },
        "/v1/functions/{function}": {"get": look, "delete": delete},
        "/v1/functions/{function}/logs": {"get": _logs(name)},
        "/v2/{function}/warmup": {"post": _warmup(name)},
        "/healthz": {"get": {"summary": "Whether it lives.", "responses": {"200": json_answer("Alive.", {"type": "object", "properties": {"status": {"const": "alive"}}})}}},
        "/readyz": {"get": {"summary": "Whether it takes requests.", "responses": {"200": json_answer("Takes requests.", ready), "503": json_answer("Is shutting down.", ready)}}},
        "/metrics": {"get": {"summary": "Prometheus exposition.", "responses": {"200": {"description": "Counts and times.", "content": {"text/plain": {"schema": _TEXT}}}}}},
        "/openapi.json": {"get": {"summary": "This description.", "responses": {"200": json_answer("OpenAPI 3.1.", {"type": "object"})}}},
    }  # fmt: skip


def _deploy() -> dict[str, Any]:
    return {
        "summary": "Deploys a folder of this node, or an uploaded tar.gz: a new revision of its function.",
        "parameters": [
            query("set", {"type": "array", "items": _TEXT}, "Of an upload: settings, as scale.max=8."),
            query("install", _FLAG, "Of an upload: whether its requirements may be installed."),
            query("check", _FLAG, "Of an upload: whether a worker must have started before it is live."),
        ],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _deploy_schema()},
                "application/gzip": {"schema": {"type": "string", "format": "binary"}},
            },
        },
        "responses": {
            "201": json_answer("The function, live.", _STATUS),
            **errors(ERROR, 400, 408, 413, 415, 422, 500, 502, 503, 507),
        },
    }


def _logs(name: dict[str, Any]) -> dict[str, Any]:
    lines = {"type": "integer", "minimum": 0, "maximum": MAX_LOG_LINES, "default": 100}
    return {
        "summary": "The last lines that a function's processes printed.",
        "parameters": [
            name,
            query("lines", lines, "At most so many."),
            query("follow", _FLAG, "Whether to go on with lines as they come; that answer does not end."),
        ],
        "responses": {
            "200": {
                "description": "Lines, one JSON object each.",
                "content": {"application/x-ndjson": {"schema": _TEXT}},
            },
            **errors(ERROR, 400, 404, 503),
        },
    }


def _warmup(name: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "integer", "minimum": 0, "default": 1}
    count = {"type": "integer", "minimum": 0}
    states = ("ready", "starting", "draining")
    workers = {"type": "object", "required": list(states), "properties": dict.fromkeys(states, count)}
    answer = {"type": "object", "required": ["workers"], "properties": {"workers": workers}}
    return {
        "summary": "Starts workers before they are called.",
        "parameters": [name, query("workers", schema, "So many in all; scale.max at most.")],
        "responses": {"200": json_answer("Workers now.", answer), **errors(ERROR, 400, 404, 503)},
    }


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _deploy_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["path"],
        "additionalProperties": False,
        "properties": {
            "path": {
                "type": "string",
                "description": "Absolute path of the function's folder on the gateway's node.",
            },
            "overrides": {"type": "object", "description": "Dotted settings, as scale.max."},
            "install": {"type": "boolean", "default": False},
            "check": {"type": "boolean", "default": True},
        },
    }


def _error_schema() -> dict[str, Any]:
    text = {"type": "string"}
    error = {
        "type": "object",
        "required": ["type", "message"],
        "properties": {
            "type": text,
            "message": text,
            "remedy": text,
            "request_id": text,
            "details": {"type": "object"},
        },
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}

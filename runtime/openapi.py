"""The OpenAPI description of a gateway: its own routes, and each function's input and output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._version import __version__
from .access.described import SECURITY_SCHEMES, access_paths, access_schemas, guarded
from .described import spelled_paths, spelled_schemas
from .functions import FunctionStatus

ERROR = {"$ref": "#/components/schemas/Error"}


def describe(functions: Iterable[FunctionStatus]) -> dict[str, Any]:
    """OpenAPI 3.1, with one path a function."""
    schemas: dict[str, Any] = {"Error": _error_schema()}
    status = FunctionStatus.model_json_schema(
        mode="serialization", ref_template="#/components/schemas/{model}"
    )
    schemas.update(status.pop("$defs", {}))
    schemas["FunctionStatus"] = status
    schemas["Delivery"] = _delivery_schema()
    paths = _control_paths()
    for function in functions:
        paths[f"/invoke/{function.name}"] = {"post": _invoke(function)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pilotlight",
            "version": __version__,
            "description": "Functions that start when called.",
        },
        "paths": guarded(paths | access_paths(ERROR) | spelled_paths(ERROR), ERROR),
        "components": {
            "schemas": schemas | access_schemas() | spelled_schemas(),
            "securitySchemes": SECURITY_SCHEMES,
        },
    }


def _invoke(function: FunctionStatus) -> dict[str, Any]:
    if function.streaming:
        answer: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
    else:
        answer = {"application/json": {"schema": _inline(f"{function.name}:output", function.output_schema)}}
    return {
        "operationId": f"invoke_{function.name}",
        "summary": f"Calls {function.name} ({function.revision}) and waits for its answer.",
        "requestBody": {
            "content": {
                "application/json": {"schema": _inline(f"{function.name}:input", function.input_schema)}
            }
        },
        "responses": {
            "200": {"description": "The answer.", "content": answer},
            **_errors(400, 413, 422, 429, 500, 503, 504),
        },
    }


def _inline(function: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A pydantic schema as a resource of its own, so that its `#/$defs/…` references find its own `$defs`."""
    return {"$id": f"urn:pilotlight:{function}", **schema} if "$defs" in schema else schema


def _control_paths() -> dict[str, Any]:
    name = {"name": "function", "in": "path", "required": True, "schema": {"type": "string"}}
    status = {"$ref": "#/components/schemas/FunctionStatus"}
    listing = {"type": "object", "properties": {"functions": {"type": "array", "items": status}}}
    one_delivery = {"$ref": "#/components/schemas/Delivery"}
    deliveries = {"type": "object", "properties": {"deliveries": {"type": "array", "items": one_delivery}}}
    delivery = {"name": "delivery", "in": "path", "required": True, "schema": {"type": "string"}}
    one = {"parameters": [name], "responses": {"200": _json("The function.", status), **_errors(404)}}
    deploy = {
        "summary": "Deploys a folder of this node, or an uploaded tar.gz: a new revision of its function.",
        "requestBody": {
            "content": {
                "application/json": {"schema": _deploy_schema()},
                "application/gzip": {"schema": {"type": "string", "format": "binary"}},
            }
        },
        "responses": {"201": _json("The function, live.", status), **_errors(400, 413, 415, 422)},
    }
    webhooks = "/v1/functions/{function}/webhooks"
    workers = {"name": "workers", "in": "query", "schema": {"type": "integer", "minimum": 0, "default": 1}}
    return {
        "/v1/functions": {"get": {"responses": {"200": _json("All functions.", listing)}}, "post": deploy},
        "/v1/functions/{function}": {"get": one, "delete": {"parameters": [name], "responses": {"200": _json("Deleted.", {}), **_errors(404)}}},
        "/v1/functions/{function}/logs": {"get": {"parameters": [name], "responses": {"200": {"description": "Lines as NDJSON."}, **_errors(404)}}},
        webhooks: {"get": {"summary": "Lists deliveries of webhooks, the newest first.", "parameters": [name, *_filters()], "responses": {"200": _json("The deliveries.", deliveries), **_errors(400, 404)}}},
        f"{webhooks}/{{delivery}}/redeliver": {"post": {"summary": "Sends a delivery again, under its id.", "parameters": [name, delivery], "responses": {"200": _json("The delivery, pending.", one_delivery), **_errors(404)}}},
        "/v2/{function}/warmup": {"post": {"parameters": [name, workers], "responses": {"200": _json("Workers now.", {}), **_errors(400, 404)}}},
        "/healthz": {"get": {"responses": {"200": _json("Alive.", {})}}},
        "/readyz": {"get": {"responses": {"200": _json("Takes requests.", {}), "503": _json("Is shutting down.", {})}}},
        "/metrics": {"get": {"responses": {"200": {"description": "Prometheus exposition."}}}},
    }  # fmt: skip


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _errors(*codes: int) -> dict[str, Any]:
    return {str(code): _json("A typed error.", ERROR) for code in codes}


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


def _filters() -> list[dict[str, Any]]:
    """What deliveries may be chosen by."""
    states = {"type": "array", "items": {"enum": ["PENDING", "DELIVERED", "DEAD"]}}
    return [
        {"name": "job", "in": "query", "schema": {"type": "string"}},
        {"name": "state", "in": "query", "schema": states},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": 100}},
    ]


def _delivery_schema() -> dict[str, Any]:
    text, moment = {"type": "string"}, {"type": "string", "format": "date-time"}
    later = {"type": ["string", "null"], "format": "date-time"}
    count, status = {"type": "integer"}, {"type": ["integer", "null"]}
    attempt = {"type": "object", "properties": {"at": moment, "status": status, "error": text, "ms": count}}
    properties = {
        "id": text, "job_id": text, "event": text, "url": text, "state": text, "attempts": count,
        "next_at": later, "created_at": moment, "last_status": status, "last_error": text,
        "log": {"type": "array", "items": attempt},
    }  # fmt: skip
    return {"type": "object", "required": list(properties), "properties": properties}


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

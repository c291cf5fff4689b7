"""The OpenAPI description of access: routes of keys and secrets, and what every route answers to the wrong key."""

from __future__ import annotations

from typing import Any

from ..access.keys import NewKey
from .rules import OPEN

_TEXT = {"type": "string"}
_MOMENT = {"type": ["string", "null"], "format": "date-time"}
_NUMBER = {"type": ["number", "null"]}


def access_paths(error: dict[str, Any]) -> dict[str, Any]:
    """Paths of keys and secrets; `error` is the schema of a typed error."""
    key = {"$ref": "#/components/schemas/ApiKey"}
    made = {"allOf": [key, {"type": "object", "required": ["key"], "properties": {"key": _TEXT}}]}
    listing = {"type": "object", "properties": {"keys": {"type": "array", "items": key}}}
    names = {
        "type": "object",
        "properties": {"function": _TEXT, "secrets": {"type": "array", "items": _TEXT}},
    }
    value = {
        "type": "object",
        "required": ["value"],
        "additionalProperties": False,
        "properties": {"value": _TEXT},
    }
    function, secret = _parameter("function"), _parameter("key")
    answers = {code: _answer("A typed error.", error) for code in ("400", "404", "408", "413", "422", "503")}
    secrets = "/v1/functions/{function}/secrets"
    return {
        "/v1/keys": {
            "post": {"summary": "Makes an API key, told this once.", "requestBody": _body({"$ref": "#/components/schemas/NewKey"}), "responses": {"201": _answer("The key.", made), **answers}},
            "get": {"summary": "Lists the API keys.", "responses": {"200": _answer("The keys.", listing)}},
        },
        "/v1/keys/{id}": {"delete": {"summary": "Revokes an API key.", "parameters": [_parameter("id")], "responses": {"200": _answer("Revoked.", {}), **answers}}},
        secrets: {"get": {"summary": "Lists the names of a function's secrets.", "parameters": [function], "responses": {"200": _answer("The names.", names), **answers}}},
        f"{secrets}/{{key}}": {
            "put": {"summary": "Sets a secret for workers that start from now on.", "parameters": [function, secret], "requestBody": _body(value), "responses": {"200": _answer("Set.", {}), **answers}},
            "delete": {"summary": "Unsets a secret.", "parameters": [function, secret], "responses": {"200": _answer("Unset.", {}), **answers}},
        },
    }  # fmt: skip


def access_schemas() -> dict[str, Any]:
    """The schemas that those paths refer to."""
    properties = {
        "id": _TEXT, "name": _TEXT, "scopes": {"type": "array", "items": _TEXT},
        "functions": {"type": ["array", "null"], "items": _TEXT}, "rate_per_s": _NUMBER, "burst": _NUMBER,
        "concurrency": _NUMBER, "created_at": _MOMENT, "expires_at": _MOMENT, "last_used_at": _MOMENT,
    }  # fmt: skip
    new = NewKey.model_json_schema(ref_template="#/components/schemas/{model}")
    return {
        "ApiKey": {"type": "object", "required": list(properties), "properties": properties},
        **new.pop("$defs"),
        "NewKey": new,
    }


def guarded(paths: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """The same paths, with what the guard may answer instead, and that a key may be asked for."""
    answers = {code: _answer("A typed error: the API key.", error) for code in ("401", "403", "404", "429")}
    for path, operations in paths.items():
        if path not in OPEN:
            for operation in operations.values():
                operation["responses"] = answers | operation["responses"]
                operation["security"] = [{}, {"key": []}]
    return paths


SECURITY_SCHEMES = {"key": {"type": "http", "scheme": "bearer", "description": "An API key: pf_…"}}


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}

"""The OpenAPI description of webhooks' deliveries."""

from __future__ import annotations

from typing import Any

from .openapi_parts import json_answer

_DELIVERY = {"$ref": "#/components/schemas/Delivery"}
_TEXT = {"type": "string"}
_PATH = "/v1/functions/{function}/webhooks"


def webhook_schemas() -> dict[str, Any]:
    """The schemas that those paths refer to."""
    return {"Delivery": _delivery_schema()}


def webhook_paths(error: dict[str, Any]) -> dict[str, Any]:
    """Their paths; `error` is the schema of a typed error."""
    name = {"name": "function", "in": "path", "required": True, "schema": _TEXT}
    delivery = {"name": "delivery", "in": "path", "required": True, "schema": _TEXT}
    found = {
        "type": "object",
        "required": ["deliveries"],
        "properties": {"deliveries": {"type": "array", "items": _DELIVERY}},
    }
    refused = {code: json_answer("A typed error.", error) for code in ("400", "404", "503")}
    listing = {
        "summary": "Lists deliveries of webhooks, the newest first.",
        "parameters": [name, *_filters()],
        "responses": {"200": json_answer("The deliveries.", found), **refused},
    }
    again = {
        "summary": "Sends a delivery again, under its id.",
        "parameters": [name, delivery],
        "responses": {"200": json_answer("The delivery, pending.", _DELIVERY), **refused},
    }
    signed = {
        "type": "object",
        "required": ["function", "secret"],
        "properties": {"function": _TEXT, "secret": {"type": "string", "pattern": "^whsec_"}},
    }
    secret = {
        "summary": "Tells the secret that a function's webhooks are signed with, after Standard Webhooks.",
        "parameters": [name],
        "responses": {"200": json_answer("The secret, for receivers.", signed), **refused},
    }
    return {
        _PATH: {"get": listing},
        f"{_PATH}/secret": {"get": secret},
        f"{_PATH}/{{delivery}}/redeliver": {"post": again},
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

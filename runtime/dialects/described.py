"""The OpenAPI description of calls and jobs as others spell them: Cog's, Lambda's and CloudEvents' routes."""

from __future__ import annotations

from typing import Any

from ..api.openapi_parts import errors, json_answer
from .cloudevents.parsing import BATCHED, REQUIRED, STRUCTURED
from .cog.prediction import ID, STATUSES, PredictionRequest

_TEXT = {"type": "string"}
_MAYBE = {"type": ["string", "null"]}
_MOMENT = {"type": ["string", "null"], "format": "date-time"}
_HEALTH = {"type": "string", "enum": ["STARTING", "READY", "BUSY", "SETUP_FAILED", "DEFUNCT"]}
_PREDICTION = {"$ref": "#/components/schemas/Prediction"}
EVENTS = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "required": ["event", "data"],
            "properties": {"event": _TEXT, "data": _TEXT, "id": _TEXT},
            "description": "Each event.",
        }
    }
}


def spelled_paths(error: dict[str, Any]) -> dict[str, Any]:
    """Their paths; `error` is the schema of a typed error."""
    return _predictions(error) | _lambda(error) | _events(error)


def spelled_schemas() -> dict[str, Any]:
    """The schemas that those paths refer to."""
    fields: dict[str, Any] = {
        "id": _TEXT, "version": _TEXT, "status": {"type": "string", "enum": sorted(set(STATUSES.values()))},
        "input": {}, "output": {}, "error": _MAYBE, "logs": _TEXT,
        "metrics": {"type": "object", "properties": {"predict_time": {"type": "number", "minimum": 0}}},
        "created_at": _MOMENT, "started_at": _MOMENT, "completed_at": _MOMENT, "webhook": _MAYBE,
    }  # fmt: skip
    event = {
        "type": "object",
        "required": list(REQUIRED),
        "properties": {name: {"type": "string", "minLength": 1} for name in REQUIRED}
        | {"specversion": {"const": "1.0"}, "data": {}, "data_base64": _TEXT},
    }
    accepted = {"type": "object", "required": ["id", "status"], "properties": {"id": _TEXT, "status": _TEXT}}
    refusal = {"type": "object", "required": ["Type", "Message"], "properties": {"Type": {"enum": ["User", "Service"]}, "Message": _TEXT}}  # fmt: skip
    return {
        "Prediction": {"type": "object", "required": list(fields), "properties": fields},
        "ReceivedEvent": event,
        "Accepted": accepted,
        "LambdaError": refusal,
    }


def _predictions(error: dict[str, Any]) -> dict[str, Any]:
    which = {"name": "function", "in": "query", "schema": _TEXT}
    header = {"name": "X-Pilotflame-Function", "in": "header", "schema": _TEXT}
    prefer = {"name": "Prefer", "in": "header", "schema": _TEXT, "description": "respond-async, wait=seconds"}
    job = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
    chosen = {**job, "schema": {"type": "string", "pattern": f"^{ID.pattern}$"}}
    shown = {"application/json": {"schema": _PREDICTION}, **EVENTS}
    made = {
        "200": {"description": "The prediction, ended.", "content": shown},
        "202": json_answer("The prediction, going on.", _PREDICTION),
        **errors(error, 400, 404, 408, 409, 413, 422, 503),
    }
    new = {"requestBody": _body(PredictionRequest.model_json_schema()), "responses": made}
    seen = {"200": {"description": "The prediction.", "content": shown}, **errors(error, 404, 410, 503)}
    health = {
        "type": "object",
        "required": ["status"],
        "properties": {"status": _HEALTH, "functions": {"type": "object", "additionalProperties": _HEALTH}},
    }
    return {
        "/predictions": {"post": {"summary": "Makes a prediction and waits for it.", "parameters": [which, header, prefer], **new}},
        "/predictions/{id}": {
            "put": {"summary": "Makes the prediction with this id, or gives it if it was made.", "parameters": [chosen, which, header, prefer], **new},
            "get": {"summary": "Shows a prediction.", "parameters": [job], "responses": seen},
        },
        "/predictions/{id}/cancel": {"post": {"summary": "Cancels a prediction unless it has ended.", "parameters": [job], "responses": seen}},
        "/health-check": {"get": {"summary": "How the function is, or all are.", "parameters": [which, header], "responses": {"200": json_answer("How it is.", health), **errors(error, 404)}}},
    }  # fmt: skip


def _lambda(error: dict[str, Any]) -> dict[str, Any]:
    either = {"anyOf": [{"$ref": "#/components/schemas/LambdaError"}, error]}
    kind = {"name": "X-Amz-Invocation-Type", "in": "header", "schema": {"enum": ["RequestResponse", "Event", "DryRun"], "default": "RequestResponse"}}  # fmt: skip
    name = {
        "name": "name",
        "in": "path",
        "required": True,
        "schema": _TEXT,
        "description": "A name or an ARN.",
    }
    qualifier = {"name": "Qualifier", "in": "query", "schema": _TEXT}
    timeout = {
        "name": "X-Request-Timeout",
        "in": "header",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    priority = {
        "name": "X-Priority",
        "in": "header",
        "schema": {"type": "integer", "minimum": 1, "maximum": 5},
    }
    post = {
        "summary": "Calls a function as AWS Lambda is called.",
        "parameters": [name, qualifier, kind, timeout, priority],
        "requestBody": {"content": {"application/json": {"schema": {}}}},
        "responses": {
            "200": {
                "description": "The answer; with X-Amz-Function-Error how the function failed.",
                "content": {"application/json": {"schema": {}}, "*/*": {}},
            },
            "202": {"description": "Event: the job is on the disk."},
            "204": {"description": "DryRun: it could be called."},
            **errors(either, 400, 401, 403, 404, 408, 413, 429, 500, 503),
        },
    }
    return {"/2015-03-31/functions/{name}/invocations": {"post": post}}


def _events(error: dict[str, Any]) -> dict[str, Any]:
    name = {"name": "function", "in": "path", "required": True, "schema": _TEXT}
    event = {"$ref": "#/components/schemas/ReceivedEvent"}
    accepted = {"$ref": "#/components/schemas/Accepted"}
    order = {"$ref": "#/components/schemas/JobOrder"}
    many = {
        "type": "object",
        "required": ["jobs"],
        "properties": {"jobs": {"type": "array", "items": accepted}},
    }
    content = {
        "application/json": {"schema": order},
        STRUCTURED: {"schema": event},
        BATCHED: {"schema": {"type": "array", "items": event}},
    }
    run = {
        "summary": "Submits a job, or one for each ReceivedEvent.",
        "parameters": [name],
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": json_answer("The job is on the disk.", accepted),
            "202": json_answer("The events' jobs are on the disk.", many),
            **errors(error, 400, 404, 408, 409, 413, 415, 422, 503),
        },
    }
    origin = {"name": "WebHook-Request-Origin", "in": "header", "required": True, "schema": _TEXT}
    shake = {
        "summary": "Whether events may be sent here.",
        "parameters": [name, origin],
        "responses": {"200": {"description": "They may."}, **errors(error, 400, 404, 503)},
    }
    return {"/v2/{function}/run": {"post": run, "options": shake}}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": {"application/json": {"schema": schema}}}

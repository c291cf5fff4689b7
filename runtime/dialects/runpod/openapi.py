"""The OpenAPI description of the queue's routes: what a job looks like, and what is done with it."""

from __future__ import annotations

from typing import Any

from ...api.openapi_parts import errors, json_answer, query
from ...api.requests import MAX_KEY_CHARS
from ...jobs.job import JobState
from ..described import EVENTS
from .routes import MAX_LISTED, MOST_WAIT_MS, WAIT_MS, JobRequest

_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_JOB = {"$ref": "#/components/schemas/Job"}
_STATE = {"type": "string", "enum": [state.value for state in JobState]}


def queue_schemas() -> dict[str, Any]:
    """The schemas that the paths refer to. A job is data: how its handler failed is in it, under 200."""
    job = {
        "id": _TEXT, "status": _STATE, "function": _TEXT,
        "output": {"description": "The answer; while the job runs, how far it is."},
        "output_type": {"type": "string", "description": "Of an output that is not JSON, which is Base64 here."},
        "error": _TEXT,
        "errorDetails": {"type": "object", "required": ["type", "message"], "properties": {"type": _TEXT, "message": _TEXT}},
        "pieces": _COUNT, "delayTime": _COUNT, "executionTime": _COUNT, "workerId": _TEXT,
    }  # fmt: skip
    order = JobRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    piece = {
        "type": "object",
        "required": ["output", "number"],
        "properties": {"output": {}, "number": {"type": "integer", "minimum": 1}},
    }
    return {
        "Job": {
            "type": "object",
            "required": ["id", "status", "function", "delayTime", "executionTime", "workerId"],
            "properties": job,
        },
        **order.pop("$defs"),
        "JobOrder": order,
        "JobPiece": piece,
    }


def queue_paths(error: dict[str, Any]) -> dict[str, Any]:
    """Their paths; `error` is the schema of a typed error. `run` stands with the events that it takes as well."""
    function, job = _path("function"), _path("job")
    shown = json_answer("The job.", _JOB)
    wait = query("wait", _COUNT, f"Milliseconds, {MOST_WAIT_MS} at most; {WAIT_MS} if it is not said.")
    after = query(
        "after", _COUNT, "The number of the last piece that was seen; else where the last poll ended."
    )
    last = {"name": "Last-Event-ID", "in": "header", "schema": _TEXT}
    sync = {
        "summary": "Submits a job and waits for its end, or for as long as is asked.",
        "parameters": [function, wait, *submit_headers()],
        "requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobOrder"}}}},
        "responses": {"200": _submitted("The job as it is by now.", _JOB), **errors(error, 400, 404, 408, 409, 413, 422, 503)},
    }  # fmt: skip
    look = {
        "summary": "Shows a job.",
        "parameters": [function, job],
        "responses": {"200": shown, **errors(error, 404, 410, 503)},
    }
    stream = {
        "summary": "The pieces since the last poll; all that come, for who accepts text/event-stream.",
        "parameters": [function, job, after, last],
        "responses": {"200": _pieces(), **errors(error, 400, 404, 410, 503)},
    }
    cancel = {"summary": "Cancels a job unless it has ended.", **_rest(look)}
    retry = {
        "summary": "Queues a job that failed or timed out again.",
        "parameters": [function, job],
        "responses": {"200": shown, **errors(error, 404, 409, 410, 503)},
    }
    base = "/v2/{function}"
    return {
        f"{base}/runsync": {"post": sync},
        f"{base}/status/{{job}}": {"get": look, "post": look},
        f"{base}/stream/{{job}}": {"get": stream, "post": stream},
        f"{base}/cancel/{{job}}": {"post": cancel},
        f"{base}/retry/{{job}}": {"post": retry},
        f"{base}/purge-queue": {"post": _purge(function, error)},
        f"{base}/health": {"get": _health(function, error)},
        f"{base}/requests": {"get": _requests(function, error)},
    }


def submit_headers() -> list[dict[str, Any]]:
    """What a submit may be sent with."""
    key = {"type": "string", "maxLength": MAX_KEY_CHARS}
    told = "The same key with the same order is the same job."
    return [
        {"name": "Idempotency-Key", "in": "header", "schema": key, "description": told},
        {"name": "traceparent", "in": "header", "schema": _TEXT},
    ]


def _purge(function: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    answer = {
        "type": "object",
        "required": ["removed", "status"],
        "properties": {"removed": _COUNT, "status": {"const": "completed"}},
    }
    return {
        "summary": "Cancels all jobs that wait.",
        "parameters": [function],
        "responses": {"200": json_answer("How many there were.", answer), **errors(error, 404, 503)},
    }


def _health(function: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    jobs = ("completed", "failed", "inProgress", "inQueue", "retried", "cancelled")
    workers = ("idle", "running", "initializing", "ready", "throttled", "unhealthy", "draining")
    parts = {
        name: {"type": "object", "required": list(keys), "properties": dict.fromkeys(keys, _COUNT)}
        for name, keys in (("jobs", jobs), ("workers", workers))
    }
    answer = {"type": "object", "required": list(parts), "properties": parts}
    return {
        "summary": "How many jobs and workers there are, by state.",
        "parameters": [function],
        "responses": {"200": json_answer("The counts.", answer), **errors(error, 404, 503)},
    }


def _requests(function: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    states = {"type": "array", "items": _STATE}
    answer = {
        "type": "object",
        "required": ["requests"],
        "properties": {"requests": {"type": "array", "items": _JOB, "maxItems": MAX_LISTED}},
    }
    asked = [
        query("status", states, "Only jobs in these states."),
        query("limit", _COUNT, f"At most so many, and never more than {MAX_LISTED}; 100 if it is not said."),
        query("before", _TEXT, "A job's id: only older ones."),
    ]
    return {
        "summary": "Lists jobs, the newest first, without their outputs.",
        "parameters": [function, *asked],
        "responses": {"200": json_answer("The jobs.", answer), **errors(error, 400, 404, 410, 503)},
    }


def _pieces() -> dict[str, Any]:
    answer = {
        "type": "object",
        "required": ["id", "status", "stream"],
        "properties": {
            "id": _TEXT,
            "status": _STATE,
            "stream": {"type": "array", "items": {"$ref": "#/components/schemas/JobPiece"}},
        },
    }
    content = {"application/json": {"schema": answer}, **EVENTS}
    return {"description": "The pieces.", "content": content}


def _rest(operation: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in operation.items() if key != "summary"}


def _path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _TEXT}


def _submitted(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    replayed = {
        "description": "Sent if the job was there before.",
        "schema": {"type": "string", "const": "true"},
    }
    return {**json_answer(description, schema), "headers": {"Idempotent-Replayed": replayed}}

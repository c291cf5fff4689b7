"""Responds to errors as Anthropic does. The errors also have pilotflame's own members `remedy` and `details`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

import orjson
from typing_extensions import TypedDict

from ....errors import PilotflameError
from ...front.http.responses import ErrorFields, Response
from ..completions.errors import openai_error_reply

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_OVERLOADED = 529
"""The status that Anthropic sends instead of 503."""


class MessageErrorFields(ErrorFields):
    """`type` is a class of errors, and `code` is the stable code of this one."""

    code: str


class MessageError(TypedDict):
    """The body of every error."""

    type: Literal["error"]
    error: MessageErrorFields
    request_id: NotRequired[str]


def error_body(error: PilotflameError, request_id: str) -> MessageError:
    """Return the body of a response, or of an event in a stream, for an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    found: Any = {**error.to_wire(), "type": kind, "code": error.code}
    if error.details.get("reason") == "context_length_exceeded":
        # Clients look for these words, and shorten the prompt.
        found["message"] = f"prompt is too long: {error.message}"
    return {"type": "error", "error": found, "request_id": request_id}


def anthropic_error_reply(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error. Its headers tell the clients whether and when to try again."""
    reply = openai_error_reply(error, request_id)
    reply.headers["request-id"] = request_id
    status = _OVERLOADED if reply.status == 503 else reply.status
    return reply._replace(status=status, body=orjson.dumps(error_body(error, request_id)))


ERRORS: dict[str, Any] = {"error_format": anthropic_error_reply, "error_type": MessageError}
"""The fields of a Route that responds to errors in Anthropic's form."""

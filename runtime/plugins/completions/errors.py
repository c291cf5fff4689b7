"""Responds to errors as OpenAI does."""

from __future__ import annotations

from typing import Any

import orjson
from typing_extensions import TypedDict

from ....errors import ActivationFailed, HandlerError, PilotflameError, UnknownFunction
from ...front.http.responses import Response, error_reply

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class OpenAiErrorFields(TypedDict):
    """`param` is the field at fault. `type` is a class of errors, and `code` is the stable code of this one. `remedy`, which `message` has
    too, is what to do.
    """

    message: str
    type: str
    param: str | None
    code: str
    remedy: str


class OpenAiError(TypedDict):
    """The body of every error."""

    error: OpenAiErrorFields


def error_body(error: PilotflameError) -> OpenAiError:
    """Return the body of a response, or of an event in a stream, for an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message = f"{error.message} {error.remedy}".strip()
    # Clients act on these codes: langchain shortens a prompt, and others look for another model.
    code = "model_not_found" if isinstance(error, UnknownFunction) else error.code
    code = str(error.details.get("reason", code))
    field = error.details.get("field")
    return {"error": {"message": message, "type": kind, "param": field, "code": code, "remedy": error.remedy}}


def openai_error_reply(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error. Its headers tell OpenAI's clients whether and when to try again."""
    # OpenAI has no 422.
    status = 400 if error.status == 422 else error.status
    reply = error_reply(error, request_id)._replace(status=status, body=orjson.dumps(error_body(error)))
    # OpenAI's clients repeat a request after any status from 500 on. Forbid it if the call may have run. With a 503 and with
    # these two kinds of errors, nothing has run.
    if error.status >= 500 and error.status != 503 and not isinstance(error, ActivationFailed | HandlerError):
        reply.headers["x-should-retry"] = "false"
    return reply


def unrouted_reply(error: PilotflameError, request_id: str) -> Response:
    """Return the response for a path without a route. It has OpenAI's form, and also the fields of the gateway's own form."""
    found = {**error.to_wire(), "request_id": request_id, "param": None, "code": error.code}
    return error_reply(error, request_id)._replace(body=orjson.dumps({"error": found}))


ERRORS: dict[str, Any] = {"error_format": openai_error_reply, "error_type": OpenAiError}
"""The fields of a Route that responds to errors in OpenAI's form."""

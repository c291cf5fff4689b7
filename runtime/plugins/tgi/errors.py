"""Responds to errors as TGI does."""

from __future__ import annotations

from typing import Any

import orjson
from typing_extensions import TypedDict

from ....errors import CallEnded, OutputInvalid, PilotflameError, WorkerDied
from ...front.http.responses import Response, error_reply


class TgiError(TypedDict):
    """The body of every error. `error_type` is validation, overloaded, generation or incomplete_generation."""

    error: str
    error_type: str


def error_body(error: PilotflameError) -> TgiError:
    """Return the body of a response, or of an event in a stream, for an error."""
    return {"error": f"{error.message} {error.remedy}".strip(), "error_type": _kind(error)[0]}


def tgi_error_reply(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error, with TGI's status. The gateway's headers tell when to retry."""
    status, body = _kind(error)[1], orjson.dumps(error_body(error))
    return error_reply(error, request_id)._replace(status=status, body=body)


def _kind(error: PilotflameError) -> tuple[str, int]:
    """Return TGI's type of an error, and its status."""
    lost = isinstance(error, CallEnded) and not error.repeatable
    if lost or isinstance(error, WorkerDied | OutputInvalid):
        return "incomplete_generation", 500
    if error.status in (429, 503):
        return "overloaded", 429
    if error.status >= 500:
        return "generation", 424
    return "validation", 422 if error.status == 400 else error.status


ERRORS: dict[str, Any] = {"error_format": tgi_error_reply, "error_type": TgiError}
"""The fields of a Route that responds to errors in TGI's form."""

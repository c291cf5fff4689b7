"""Responds to errors as Replicate does, with problem details (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from typing_extensions import TypedDict

from ....errors import PilotflameError
from ...front.http.responses import ErrorFields, Response, error_reply


class Problem(TypedDict):
    """The body of an error: problem details, and our own fields."""

    title: str
    detail: str
    status: int
    error: ErrorFields


def problem_reply(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error."""
    reply = error_reply(error, request_id)
    details = {"title": HTTPStatus(error.status).phrase, "detail": str(error), "status": error.status}
    return reply._replace(body=orjson.dumps(details | orjson.loads(reply.body)))


ERRORS: dict[str, Any] = {"error_format": problem_reply, "error_type": Problem}
"""The fields of a Route that responds to errors with problem details."""

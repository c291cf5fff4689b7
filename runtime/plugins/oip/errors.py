"""Responds to errors as Triton does."""

from __future__ import annotations

from typing import Any

import orjson
from typing_extensions import TypedDict

from ....errors import PilotflameError, UnknownFunction
from ...front.http.responses import Response, error_reply


class OipError(TypedDict):
    """The body of every error."""

    error: str


def error_text(error: PilotflameError) -> str:
    """Return the text of an error. The text for an unknown model begins with words that Triton's clients look for."""
    found = f"{error.message} {error.remedy}".strip()
    return f"Request for unknown model: {found}" if isinstance(error, UnknownFunction) else found


def load_failure(name: str) -> str:
    """Return the beginning of the error text for a failed load."""
    return f"failed to load '{name[:80]}', failed to poll from model repository: "


def status_of(error: PilotflameError) -> int:
    """Return the HTTP status of an error. The protocol has no 422."""
    return 400 if error.status == 422 else error.status


def oip_error_reply(error: PilotflameError, request_id: str, beginning: str = "") -> Response:
    """Return the response for an error. Its text begins with `beginning`."""
    body = orjson.dumps(OipError(error=beginning + error_text(error)))
    return error_reply(error, request_id)._replace(status=status_of(error), body=body)


ERRORS: dict[str, Any] = {"error_format": oip_error_reply, "error_type": OipError}
"""The fields of a Route that responds to errors in Triton's form."""

"""Responds to errors as TensorFlow Serving and KServe do: with an object whose only field is `error`."""

from __future__ import annotations

from typing import Any

import orjson
from typing_extensions import TypedDict

from ....errors import MethodNotAllowed, PilotflameError, UnknownFunction, UnknownRoute
from ...front.http.responses import Response, error_reply

_STATUSES = {405: 400, 408: 504, 413: 400, 415: 400, 422: 400, 502: 503, 507: 503}
"""The statuses that TensorFlow Serving does not have, each with the status that it sends instead."""


class ServingError(TypedDict):
    """The body of every error."""

    error: str


def serving_error_reply(error: PilotflameError, request_id: str) -> Response:
    """Return TensorFlow Serving's response for an error."""
    if isinstance(error, UnknownFunction) and error.name:
        return _reply(error, request_id, f"Servable not found for request: Latest({error.name})")
    if isinstance(error, UnknownRoute | MethodNotAllowed):
        return _reply(error, request_id, f"Malformed request: {error}", status=400)
    return _reply(error, request_id, str(error))


def kserve_error_reply(error: PilotflameError, request_id: str) -> Response:
    """Return KServe's response for an error."""
    if isinstance(error, UnknownFunction) and error.name:
        return _reply(error, request_id, f"Model with name {error.name} does not exist.")
    return _reply(error, request_id, str(error))


def _reply(error: PilotflameError, request_id: str, text: str, *, status: int = 0) -> Response:
    status = status or _STATUSES.get(error.status, error.status)
    body = orjson.dumps(ServingError(error=text))
    return error_reply(error, request_id)._replace(status=status, body=body)


SERVING_ERRORS: dict[str, Any] = {"error_format": serving_error_reply, "error_type": ServingError}
KSERVE_ERRORS: dict[str, Any] = {"error_format": kserve_error_reply, "error_type": ServingError}
"""The fields of a Route that responds to errors in KServe's form."""

"""Errors as AWS Lambda sends them, from which its clients make their exceptions."""

from __future__ import annotations

from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from .... import errors
from ....errors import PilotflameError
from ...api.responses import json_response, retry_headers

_NAMES = (
    (errors.UnknownFunction, "ResourceNotFoundException"),
    (errors.BadInput, "InvalidRequestContentException"),
    (errors.InputTooLarge, "RequestTooLargeException"),
    (errors.QueueFull, "TooManyRequestsException"),
    (errors.QuotaExceeded, "TooManyRequestsException"),
    (errors.Unauthorized, "UnrecognizedClientException"),
    (errors.Forbidden, "AccessDeniedException"),
)


class LambdaError(TypedDict):
    """The body of an error."""

    Type: Literal["User", "Service"]
    Message: str


def aws_error(error: PilotflameError, request_id: str = "") -> web.Response:
    """Return the response; its status is the same as on other routes."""
    ours = error.status >= 500
    name = next((name for cls, name in _NAMES if isinstance(error, cls)), "")
    headers = {"x-amzn-ErrorType": name or ("ServiceException" if ours else "InvalidParameterValueException")}
    if request_id:
        headers["x-amzn-RequestId"] = request_id
    headers.update(retry_headers(error))
    body = LambdaError(Type="Service" if ours else "User", Message=str(error))
    return json_response(body, status=error.status, headers=headers)

"""An error in AWS's words: what Lambda's clients turn into their exceptions."""

from __future__ import annotations

import orjson
from aiohttp import web

from ....errors import (
    BadInput,
    Forbidden,
    InputTooLarge,
    PilotflameError,
    QueueFull,
    QuotaExceeded,
    Unauthorized,
    UnknownFunction,
)
from ...api.responses import retry_headers

PATHS = "/2015-03-31/"
"""How the paths of those clients begin."""
_NAMES = (
    (UnknownFunction, "ResourceNotFoundException"),
    (BadInput, "InvalidRequestContentException"),
    (InputTooLarge, "RequestTooLargeException"),
    (QueueFull, "TooManyRequestsException"),
    (QuotaExceeded, "TooManyRequestsException"),
    (Unauthorized, "UnrecognizedClientException"),
    (Forbidden, "AccessDeniedException"),
)


def aws_error(error: PilotflameError, request_id: str = "") -> web.Response:
    """The response; its status is the same as everywhere."""
    ours = error.status >= 500
    name = next((name for cls, name in _NAMES if isinstance(error, cls)), "")
    headers = {"x-amzn-ErrorType": name or ("ServiceException" if ours else "InvalidParameterValueException")}
    if request_id:
        headers["x-amzn-RequestId"] = request_id
    headers.update(retry_headers(error))
    body = {"Type": "Service" if ours else "User", "Message": str(error)}
    return web.Response(
        body=orjson.dumps(body), status=error.status, headers=headers, content_type="application/json"
    )

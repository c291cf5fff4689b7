"""Describes errors as AWS Lambda does: the function's error is the output, and any other error fails the request."""

from __future__ import annotations

from typing import Literal

import orjson
from typing_extensions import TypedDict

from .... import errors
from ....errors import PilotflameError
from ....handlers.codec import JSON_TYPE
from ...http.responses import Response, retry_headers

# The errors of the function. They are sent with status 200 and the header X-Amz-Function-Error. Every other error, and
# RevisionRetired (see `LambdaApi._ended`), is an error of the request or of the gateway and keeps its own status.
FUNCTION_ERRORS = (
    errors.HandlerError, errors.HandlerFailed, errors.OutputInvalid, errors.InputInvalid, errors.WorkerDied,
    errors.DeadlineExceeded, errors.ActivationFailed,
)  # fmt: skip
ERROR_TYPES = (
    (errors.DeadlineExceeded, "Sandbox.Timedout"),
    (errors.WorkerDied, "Runtime.ExitError"),
    (errors.ActivationFailed, "Runtime.InitError"),
    (errors.OutputInvalid, "Runtime.MarshalError"),
)
ERROR_NAMES = (
    (errors.UnknownFunction, "ResourceNotFoundException"),
    (errors.BadInput, "InvalidRequestContentException"),
    (errors.InputTooLarge, "RequestTooLargeException"),
    ((errors.QueueFull, errors.QuotaExceeded), "TooManyRequestsException"),
    (errors.Unauthorized, "UnrecognizedClientException"),
    (errors.Forbidden, "AccessDeniedException"),
)


class LambdaError(TypedDict):
    """The body of an error."""

    Type: Literal["User", "Service"]
    Message: str


def aws_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error that the function did not cause."""
    ours = error.status >= 500
    name = next((name for cls, name in ERROR_NAMES if isinstance(error, cls)), "")
    name = name or ("ServiceException" if ours else "InvalidParameterValueException")
    headers = {"x-amzn-ErrorType": name, "x-amzn-RequestId": request_id, "Content-Type": JSON_TYPE}
    body = LambdaError(Type="Service" if ours else "User", Message=str(error))
    return Response(error.status, headers | retry_headers(error), orjson.dumps(body))


def function_error(error: PilotflameError, request_id: str, *, private: bool = False) -> dict[str, object]:
    """Return the body for a function's error; with `private`, the body includes the stack.

    The details of an error that a Lambda handler raised hold `errorMessage` and `errorType`.
    """
    details = error.details
    usual = next((name for cls, name in ERROR_TYPES if isinstance(error, cls)), error.code)
    trace = error.private.get("stackTrace") or error.trace.splitlines(keepends=True)
    return {
        "errorMessage": details.get("errorMessage", error.message),
        "errorType": details.get("errorType") or details.get("exception") or usual,
        "requestId": request_id,
        **({"stackTrace": trace} if trace and private else {}),
    }

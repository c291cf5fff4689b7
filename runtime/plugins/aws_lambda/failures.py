"""Describes errors as AWS Lambda does.

An error of the function is sent as the output, or in the last message of a stream. Any other error fails the request.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from .... import errors
from ....errors import PilotflameError
from ....handlers.codec import JSON_TYPE
from ...front.http.responses import Response, retry_headers
from ..amazon.event_stream import MessageStream, message

# The errors of the function. They are sent with status 200 and the header X-Amz-Function-Error. Every other error, and
# RevisionRetired (see `is_of_function`), is an error of the request or of the gateway and keeps its own status. AWS's
# clients repeat requests that failed, so a CallEnded fails the request only if it is repeatable.
FUNCTION_ERRORS = (
    errors.HandlerError, errors.HandlerFailed, errors.OutputInvalid, errors.InputInvalid, errors.WorkerDied,
    errors.DeadlineExceeded, errors.ActivationFailed,
)  # fmt: skip
ERROR_TYPES = (
    (errors.DeadlineExceeded, "Sandbox.Timedout"),
    ((errors.WorkerDied, errors.CallEnded), "Runtime.ExitError"),
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


_LAST = {":message-type": "event", ":event-type": "InvokeComplete", ":content-type": JSON_TYPE}


class LambdaError(TypedDict):
    """The body of an error."""

    Type: Literal["User", "Service"]
    Message: str


def is_of_function(error: PilotflameError) -> bool:
    """Return True if an error is sent as the output of the function."""
    if isinstance(error, errors.CallEnded):
        return not error.repeatable
    return isinstance(error, FUNCTION_ERRORS) and not isinstance(error, errors.RevisionRetired)


def aws_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error of the request or of the gateway.

    A CallEnded that is not repeatable gets the response for an error of the function, so that AWS's clients do not repeat it.
    """
    if isinstance(error, errors.CallEnded) and is_of_function(error):
        headers = {"x-amzn-RequestId": request_id, "X-Amz-Function-Error": "Unhandled"}
        told = orjson.dumps(function_error(error, request_id))
        return Response(200, headers | {"Content-Type": JSON_TYPE}, told)
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


class ResponseStream(MessageStream):
    """The response to an invocation as an event stream. Its last message carries a JSON object."""

    part: ClassVar = "PayloadChunk"

    async def complete(
        self, error: PilotflameError | None, log: str, *, private: bool = False
    ) -> web.StreamResponse:
        """Send the last message, with the function's error if it failed. `private` adds the stack to the error."""
        found: dict[str, object] = {"LogResult": log} if log else {}
        if error is not None:
            failure = function_error(error, self._invocation.id, private=private)
            found |= {"ErrorCode": failure["errorType"], "ErrorDetails": orjson.dumps(failure).decode()}
        response = await self._write(message(_LAST, orjson.dumps(found)))
        await response.write_eof()
        return response

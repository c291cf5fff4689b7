"""Describes errors as SageMaker's endpoints do: an error of the function is a ModelError, and other errors have SageMaker's other names."""

from __future__ import annotations

from typing import Any, ClassVar, NotRequired

import orjson
from aiohttp import web
from typing_extensions import TypedDict

from .... import errors
from ....errors import PilotflameError
from ....handlers.codec import JSON_TYPE
from ...front.http.responses import Response, retry_headers
from ..amazon.event_stream import MessageStream, message

MODEL_ERRORS = (
    errors.HandlerError, errors.HandlerFailed, errors.OutputInvalid, errors.InputInvalid, errors.WorkerDied,
    errors.DeadlineExceeded, errors.ActivationFailed,
)  # fmt: skip
"""The errors of the function, except those in `_NOT_OF_THE_MODEL`, which say nothing about its code. Clients repeat a call after
other errors, but not after a ModelError. So a CallEnded that must not be repeated is also a ModelError.
"""
_NOT_OF_THE_MODEL = (errors.RevisionRetired, errors.FunctionStopped)
_NAMES: tuple[tuple[Any, str, int], ...] = (
    (errors.Unauthorized, "UnrecognizedClientException", 403),
    (errors.Forbidden, "AccessDeniedException", 403),
    ((errors.QueueFull, errors.QuotaExceeded), "ThrottlingException", 429),
)


class SageMakerError(TypedDict):
    """The body of an error. Only a ModelError has the fields after the first."""

    Message: str
    OriginalStatusCode: NotRequired[int]
    OriginalMessage: NotRequired[str]
    LogStreamArn: NotRequired[str]


def sagemaker_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error."""
    name, status = _kind(error)
    headers = {"x-amzn-ErrorType": name, "x-amzn-RequestId": request_id, "Content-Type": JSON_TYPE}
    body = SageMakerError(Message=_text(error))
    if name == "ModelError":
        body["Message"] = f"The function answered with status {error.status}: {error.message}"
        body |= {"OriginalStatusCode": error.status, "OriginalMessage": error.message, "LogStreamArn": ""}
    return Response(status, headers | retry_headers(error), orjson.dumps(body))


def _kind(error: PilotflameError) -> tuple[str, int]:
    """Return the name of an error, and its status."""
    lost = isinstance(error, errors.CallEnded) and not error.repeatable
    if lost or (isinstance(error, MODEL_ERRORS) and not isinstance(error, _NOT_OF_THE_MODEL)):
        return "ModelError", 424
    for kind, name, status in _NAMES:
        if isinstance(error, kind):
            return name, status
    if error.status == 503:
        return "ServiceUnavailable", 503
    # SageMaker knows no 404: an endpoint that does not exist is a ValidationError, and so is a path or a
    # method that SageMaker does not have.
    return (
        ("InternalFailure", 500) if error.status >= 500 and error.status != 501 else ("ValidationError", 400)
    )


def _text(error: PilotflameError) -> str:
    if isinstance(error, errors.UnknownFunction) and error.name:
        return f"Endpoint {error.name} of account pilotflame not found."
    return str(error)


class PayloadStream(MessageStream):
    """The response to InvokeEndpointWithResponseStream. If the function fails after the first part, the last message is
    an exception.
    """

    part: ClassVar = "PayloadPart"

    async def finish(self, error: PilotflameError | None) -> web.StreamResponse:
        last = b""
        if error is not None:
            named = {
                ":message-type": "exception",
                ":exception-type": "ModelStreamError",
                ":content-type": JSON_TYPE,
            }
            last = message(named, orjson.dumps({"Message": error.message, "ErrorCode": error.code}))
        response = await self._write(last)
        await response.write_eof()
        return response


ERRORS: dict[str, Any] = {"error_format": sagemaker_error, "error_type": SageMakerError}
"""The fields of a Route that responds to errors in SageMaker's form."""

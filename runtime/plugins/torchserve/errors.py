"""Responds to errors as TorchServe does: `code` is the status, and `type` names a class of errors."""

from __future__ import annotations

from typing import Any

import orjson
from typing_extensions import TypedDict

from .... import errors
from ....errors import PilotflameError
from ...front.http.responses import Response, error_reply

INTERNAL = "InternalServerException"
_KINDS: tuple[tuple[Any, str, int], ...] = (
    (errors.UnknownRoute, "ResourceNotFoundException", 404),
    ((errors.MethodNotAllowed, errors.NotSupported), "MethodNotAllowedException", 405),
    (errors.AccessError, "InvalidKeyException", 0),
    (errors.OutOfMemory, INTERNAL, 507),
    ((errors.HandlerFailed, errors.OutputInvalid, errors.WorkerDied, errors.HandlerError), INTERNAL, 503),
    (errors.InputTimeout, "RequestTimeoutException", 408),
)
"""The classes of errors, each with TorchServe's name and status. 0 means the error's own status."""


class TorchServeError(TypedDict):
    """The body of every error."""

    code: int
    type: str
    message: str


def torchserve_error(error: PilotflameError, request_id: str) -> Response:
    """Return the response for an error."""
    kind, status = _kind(error)
    message = str(error)
    if isinstance(error, errors.UnknownFunction):
        kind = "ModelNotFoundException" if error.name else "ModelVersionNotFoundException"
        message = f"Model not found: {error.name}" if error.name else message
    body = TorchServeError(code=status, type=kind, message=message)
    return error_reply(error, request_id)._replace(status=status, body=orjson.dumps(body))


def _kind(error: PilotflameError) -> tuple[str, int]:
    """Return TorchServe's name of an error, and the status. A handler may have set the status."""
    chosen = error.details.get("status")
    if isinstance(error, errors.HandlerFailed) and isinstance(chosen, int) and 400 <= chosen <= 599:
        return INTERNAL, chosen
    if error.status in (429, 503):
        return "ServiceUnavailableException", 503
    for cls, kind, status in _KINDS:
        if isinstance(error, cls):
            return kind, status or error.status
    if error.status >= 500:
        return INTERNAL, error.status
    return "BadRequestException", 400 if error.status == 422 else error.status


ERRORS: dict[str, Any] = {"error_format": torchserve_error, "error_type": TorchServeError}
"""The fields of a Route that responds to errors in TorchServe's form."""

"""Errors in AWS's words: each of the tree has a name there, and says what ours says."""

from __future__ import annotations

import json

import pytest
from pilotflame.errors import (
    ActivationTimeout,
    BadInput,
    PilotflameError,
    QueueFull,
    Unauthorized,
    UnknownFunction,
)
from pilotflame.runtime.dialects.aws_lambda.errors import aws_error


@pytest.mark.parametrize(
    ("error", "name", "status", "whose"),
    [
        (UnknownFunction("no f"), "ResourceNotFoundException", 404, "User"),
        (BadInput("no JSON"), "InvalidRequestContentException", 400, "User"),
        (QueueFull("full"), "TooManyRequestsException", 429, "User"),
        (Unauthorized("who?"), "UnrecognizedClientException", 401, "User"),
        (ActivationTimeout("late"), "ServiceException", 503, "Service"),
    ],
)
def test_each_error_has_its_name(error: PilotflameError, name: str, status: int, whose: str) -> None:
    response = aws_error(error, "r-1")
    assert (response.status, response.headers["x-amzn-ErrorType"]) == (status, name)
    assert response.headers["x-amzn-RequestId"] == "r-1"
    assert isinstance(response.body, bytes)
    assert json.loads(response.body) == {"Type": whose, "Message": error.message}
    assert ("Retry-After" in response.headers) == (status in (429, 503))

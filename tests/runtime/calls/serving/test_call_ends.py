"""Each API tells its clients to repeat a call that the gateway ended only if that is harmless: many repeat on statuses alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pilotflame.errors import CallEnded
from pilotflame.runtime.calls.serving.call_ends import CallEnd, replaced, shutting_down
from pilotflame.runtime.front.http.responses import Response, error_reply
from pilotflame.runtime.plugins.aws_lambda.failures import aws_error, function_error, is_of_function
from pilotflame.runtime.plugins.completions.errors import openai_error_reply
from pilotflame.runtime.plugins.sagemaker.failures import sagemaker_error
from pilotflame.runtime.plugins.tgi.errors import tgi_error_reply
from pilotflame.runtime.plugins.torchserve.errors import torchserve_error

ENDS = [replaced("f", 30.0), shutting_down(30.0)]
CODES = ["revision_replaced", "shutting_down"]
# TorchServe's clients and those of AWS repeat some statuses; 424 and 500 say that the model failed.
FORMATS = [
    (error_reply, 500, 503), (openai_error_reply, 500, 503), (tgi_error_reply, 500, 429), (torchserve_error, 500, 503),
    (sagemaker_error, 424, 503),
]  # fmt: skip


@pytest.mark.parametrize(("form", "once", "again"), FORMATS)
@pytest.mark.parametrize("end", ENDS, ids=CODES)
def test_an_api_invites_a_retry_only_where_it_is_harmless(
    form: Callable[[CallEnded, str], Response], once: int, again: int, end: CallEnd
) -> None:
    started, harmless = form(end(False), "id"), form(end(True), "id")
    assert (started.status, harmless.status) == (once, again)
    assert ("Retry-After" in started.headers, "Retry-After" in harmless.headers) == (False, True)
    assert (started.headers.get("x-should-retry"), harmless.headers.get("x-should-retry")) == ("false", None)


@pytest.mark.parametrize("end", ENDS, ids=CODES)
def test_clients_of_lambda_get_a_started_call_as_an_error_of_the_function(end: CallEnd) -> None:
    """They repeat requests that fail with 5xx, and no errors of functions."""
    assert (is_of_function(end(False)), is_of_function(end(True))) == (True, False)
    assert function_error(end(False), "id")["errorType"] == "Runtime.ExitError"
    assert (aws_error(end(True), "id").status, "Retry-After" in aws_error(end(True), "id").headers) == (
        503,
        True,
    )


@pytest.mark.parametrize(("end", "code"), list(zip(ENDS, CODES, strict=True)), ids=CODES)
def test_an_ended_call_has_its_name_and_a_remedy(end: CallEnd, code: str) -> None:
    assert {end(False).code, end(True).code} == {code}
    assert "30 s (drain_s)" in end(True).message
    assert "idempotent = true" in end(False).remedy
    assert "Retry-After" in end(True).remedy

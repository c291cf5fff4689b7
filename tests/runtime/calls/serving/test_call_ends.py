"""Each API lets its clients repeat a call that the gateway has ended only if a repetition is harmless.

Many clients look at the status alone to decide whether they repeat a call.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pilotflame.errors import CallEnded, OutOfMemory
from pilotflame.runtime.calls.link.child import EndCause
from pilotflame.runtime.calls.serving.call_ends import (
    CallEnd,
    activation_timeout,
    deadline_exceeded,
    death,
    execution_timeout,
    replaced,
    shutting_down,
)
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.front.http.responses import Response, error_reply
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.settings.scale_spec import ReachedLimit
from pilotflame.runtime.plugins.aws_lambda.failures import aws_error, function_error, is_of_function
from pilotflame.runtime.plugins.completions.errors import openai_error_reply
from pilotflame.runtime.plugins.sagemaker.failures import sagemaker_error
from pilotflame.runtime.plugins.tgi.errors import tgi_error_reply
from pilotflame.runtime.plugins.torchserve.errors import torchserve_error

ENDS = [replaced("f", 30.0), shutting_down(30.0)]
CODES = ["revision_replaced", "shutting_down"]
# The error format of an API, and the statuses of a call that must not be repeated and of a call that may be repeated.
# Clients of TorchServe and of AWS repeat calls with some statuses. 500 and 424 tell them that the model has failed.
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
    """Clients of Lambda repeat requests that fail with 5xx, but they do not repeat a call after an error of the function."""
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


@pytest.mark.parametrize(
    ("name", "most", "told", "remedy"),
    [
        ("max_workers", 1, "may run 1 worker (max_workers)", "PILOTFLAME_MAX_WORKERS"),
        ("max_workers", 4, "may run 4 workers (max_workers)", "PILOTFLAME_MAX_WORKERS"),
        ("gpus", 2, "GPUs (2) have no room", "add GPUs"),
        ("owner_limit", 3, "its owner may have 3 workers together", "a key that allows more workers"),
    ],
)
def test_a_caller_that_got_no_worker_learns_which_limit_was_reached(
    name: str, most: int, told: str, remedy: str
) -> None:
    reached = ReachedLimit(name, most)
    for error in (deadline_exceeded(1.26, reached), activation_timeout("f", 1.26, reached)):
        assert told in error.message
        assert "1.3 s" in error.message
        assert remedy in error.remedy
        assert error.details == {name: most}


def test_a_late_call_learns_whose_limit_it_was() -> None:
    own, callers = deadline_exceeded(5.0), deadline_exceeded(5.0, allowed_s=60.0)
    assert ("its deadline (5.0 s)" in own.message, "timeout_s" in own.remedy) == (True, True)
    assert ("caller's own time limit (5.0 s)" in callers.message, "allows 60 s" in callers.remedy) == (
        True,
        True,
    )
    queued = deadline_exceeded(5.0, allowed_s=60.0, queued=True)
    assert ("5.0 s in the queue" in queued.message, "scale.max" in queued.remedy) == (True, True)
    assert "allows 60 s. Or raise" in queued.remedy
    assert deadline_exceeded(5.0, queued=True).remedy.startswith("Raise scale.max")
    assert "hold time (5.0 s)" in activation_timeout("f", 5.0).message
    assert "execution_timeout_s, which is 7 s" in execution_timeout(7.0).message


@pytest.mark.asyncio
async def test_a_call_whose_worker_died_learns_of_what_and_how_it_would_be_repeated() -> None:
    settings = FunctionSettings(name="f")
    call = Invocation("i", b"", now_s=0.0, deadline_s=9.0, hold_until_s=9.0)
    for harmless in (False, True):
        error = death(settings, EndCause("SIGSEGV"), call, harmless=harmless)
        assert error.message == "The worker that ran this invocation died of SIGSEGV."
        assert ("idempotent = true" in error.remedy) is not harmless
    call.attempt = 2
    error = death(settings, EndCause("SIGKILL", out_of_memory=True), call, harmless=False)
    assert isinstance(error, OutOfMemory)
    assert "(attempt 2)" in error.message
    assert "It had no limit." in error.message
    limited = FunctionSettings.model_validate({"name": "f", "resources": {"memory_mb": 64}})
    error = death(limited, EndCause("SIGKILL", out_of_memory=True), call, harmless=False)
    assert "resources.memory_mb of the function is 64." in error.message
    assert error.details == {"memory_mb": 64}

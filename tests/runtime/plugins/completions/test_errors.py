"""Errors in the form of OpenAI's API: the codes and headers on which clients act."""

from __future__ import annotations

import pytest
from pilotflame import errors
from pilotflame.errors import PilotflameError
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.language_model.prompts import most_new_tokens
from pilotflame.runtime.plugins.completions.errors import error_body, openai_error_reply


def test_a_prompt_without_room_is_a_context_length_that_is_exceeded() -> None:
    """litellm recognises this error by the first words of the message, and langchain by the last words, not by the code."""
    for prompt, most in ((6, None), (3, 4)):
        asked = GenerationRequest(prompt="a", max_tokens=most)
        with pytest.raises(errors.InputInvalid) as caught:
            most_new_tokens(asked, prompt, 6)
        # Encode and decode the error, as on its way from the worker to the gateway.
        found = error_body(PilotflameError.from_wire(caught.value.to_wire()))["error"]
        assert found["code"] == "context_length_exceeded"
        assert "This model's maximum context length is 6 tokens: the prompt is too long" in found["message"]
        assert found["type"] == "invalid_request_error"


def test_an_unknown_model_has_openais_code() -> None:
    found = error_body(errors.UnknownFunction.named("llm"))["error"]
    assert (found["code"], found["type"]) == ("model_not_found", "not_found_error")


@pytest.mark.parametrize(
    "kind",
    [
        errors.HandlerFailed, errors.WorkerDied, errors.OutputInvalid, errors.DeadlineExceeded, errors.CallEnded, errors.LauncherError,
        PilotflameError,
    ],
)  # fmt: skip
def test_a_call_that_may_have_run_is_not_repeated(kind: type[PilotflameError]) -> None:
    assert openai_error_reply(kind("x"), "id").headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    "kind",
    [
        errors.QueueFull, errors.Overloaded, errors.ActivationFailed, errors.ActivationTimeout, errors.InputTimeout, errors.CrashLoop,
        errors.RevisionRetired, errors.QuotaExceeded, errors.HandlerSetupError,
    ],
)  # fmt: skip
def test_a_call_that_did_not_run_may_be_repeated(kind: type[PilotflameError]) -> None:
    assert "x-should-retry" not in openai_error_reply(kind("x"), "id").headers

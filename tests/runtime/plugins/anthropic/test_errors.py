"""Anthropic's form of errors."""

from __future__ import annotations

import orjson
import pytest
from pilotflame.errors import HandlerFailed, InputInvalid, Overloaded, PilotflameError
from pilotflame.runtime.plugins.anthropic.errors import anthropic_error_reply


def test_a_gateway_without_room_is_overloaded_and_says_when_to_try_again() -> None:
    error = Overloaded("Full.", remedy="Try again.", details={"retry_after_s": 3.0})
    reply = anthropic_error_reply(error, "r1")
    assert (reply.status, reply.headers["Retry-After"], reply.headers["request-id"]) == (529, "3", "r1")
    fields = {"type": "overloaded_error", "message": "Full.", "remedy": "Try again.", "code": "overloaded"}
    found = orjson.loads(reply.body)
    assert (found["type"], found["request_id"]) == ("error", "r1")
    assert found["error"].items() >= fields.items()


def test_a_prompt_that_is_too_long_has_the_words_that_clients_look_for() -> None:
    error = InputInvalid("Too long.", remedy="Shorten it.", details={"reason": "context_length_exceeded"})
    reply = anthropic_error_reply(error, "r1")
    assert reply.status == 400
    assert orjson.loads(reply.body)["error"]["message"] == "prompt is too long: Too long."


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        ("unauthorized", "authentication_error", 401), ("forbidden", "permission_error", 403),
        ("unknown_function", "not_found_error", 404), ("input_too_large", "request_too_large", 413),
        ("quota_exceeded", "rate_limit_error", 429), ("overloaded", "overloaded_error", 529),
        ("deadline_exceeded", "timeout_error", 504), ("job_conflict", "invalid_request_error", 409),
        ("handler_failed", "api_error", 500),
    ],
)  # fmt: skip
def test_each_status_has_the_type_that_clients_know(code: str, kind: str, status: int) -> None:
    reply = anthropic_error_reply(PilotflameError.from_wire({"type": code, "message": "No."}), "r1")
    error = orjson.loads(reply.body)["error"]
    assert (error["type"], error["code"], error["message"], reply.status) == (kind, code, "No.", status)


def test_details_stay() -> None:
    reply = anthropic_error_reply(HandlerFailed("No.", details={"line": 3}), "r1")
    assert orjson.loads(reply.body)["error"]["details"] == {"line": 3}

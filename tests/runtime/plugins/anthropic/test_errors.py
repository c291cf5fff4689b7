"""Anthropic's form of errors."""

from __future__ import annotations

import orjson
from pilotflame.errors import InputInvalid, Overloaded
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

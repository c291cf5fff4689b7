"""Messages as chat templates read them, without the null or empty fields that clients send in old turns."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.runtime.plugins.completions.messages import plain_message

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "neutral",
    [
        {"tool_calls": []}, {"tool_calls": None}, {"function_call": None}, {"refusal": None}, {"audio": None}, {"name": None},
        {"annotations": []}, {"reasoning": None, "reasoning_content": None}, {"tool_call_id": None}, {"tool_calls": {}},
    ],
)  # fmt: skip
def test_a_neutral_value_is_as_absent(neutral: dict[str, Any]) -> None:
    turn = {"role": "assistant", "content": "Hi"}
    assert plain_message({**turn, **neutral}, "messages") == turn


def test_neutral_values_of_a_call_are_as_absent() -> None:
    sent = {**CALL, "index": None, "function": {**CALL["function"], "description": None}}  # type: ignore[dict-item]
    found = plain_message({"role": "assistant", "content": None, "tool_calls": [sent]}, "messages")
    assert found["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {}}}]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_turn_without_text_has_an_empty_one(content: Any) -> None:
    assert plain_message({"role": "assistant", "content": content}, "messages")["content"] == ""

"""The text of an answer is divided into text, reasoning and calls, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.language_model.answer_parts import AnswerParts
from pilotflame.handlers.language_model.chat_form import THINK, ChatForm
from tiny_tokenizer import HERMES, LLAMA, THINKING, WITHOUT_TOOLS, byte_tokenizer

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln <b>"}}\n</tool_call>'
WANTED = ("weather", {"city": "Köln <b>"})
BARE = '{"name": "weather", "%s": {"city": "Köln <b>"}}'
TAGGED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln <b>\n</parameter>\n</function>\n</tool_call>"
)


def divided(template: str, text: str, cuts: list[int] | None = None, before: str = "") -> Any:
    """Return the text, the reasoning and the calls of an answer that comes in pieces."""
    tokenizer = byte_tokenizer(template)
    read = ChatForm.of(template).template(tools=True)
    parts = AnswerParts(tokenizer.get_response_parser(read, prefix=before))
    borders = sorted({0, *[cut % (len(text) + 1) for cut in cuts or []], len(text)})
    found = [
        parts.push(text[begin:end]) for begin, end in zip(borders, [*borders[1:], len(text)], strict=True)
    ]
    found.append(parts.finish())
    calls = [(call.name, json.loads(call.arguments)) for one in found for call in one.calls]
    assert parts.called == bool(calls)
    return "".join(one.text for one in found), "".join(one.reasoning for one in found), calls


CASES = [
    (HERMES, "only text", "only text", "", []),
    (HERMES, CALL, "", "", [WANTED]),
    (HERMES, f"First: {CALL}\n{CALL}", "First:", "", [WANTED, WANTED]),
    (HERMES, "a < b and <tool", "a < b and <tool", "", []),
    (THINKING, f"{THINK}hm</think>\n\nwell {CALL}", "well", "hm", [WANTED]),
    (LLAMA, BARE % "parameters", "", "", [WANTED]),
    (LLAMA, f"<|python_tag|>{BARE % 'parameters'}", "", "", [WANTED]),
    (LLAMA, f"It is {BARE % 'parameters'}", f"It is {BARE % 'parameters'}", "", []),
    (WITHOUT_TOOLS, BARE % "arguments", "", "", [WANTED]),
    ("tools <tool_call><function=", f"So: {TAGGED}", "So:", "", [WANTED]),
]


@pytest.mark.parametrize(("template", "text", "said", "thought", "calls"), CASES)
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_the_parts_of_an_answer(
    template: str, text: str, said: str, thought: str, calls: list[Any], cuts: list[int]
) -> None:
    found, reasoning, called = divided(template, text, cuts)
    assert (found.rstrip(), reasoning, called) == (said, thought, calls)


def test_reasoning_that_the_chat_template_has_begun() -> None:
    assert divided(THINKING, "hm</think>yes", before=THINK) == ("yes", "hm", [])


@pytest.mark.parametrize(
    "broken", ['{"name": "weather", "arguments": {', '{"nam": 1}', "[1]", '{"name": "x"}']
)
def test_a_call_that_is_not_in_the_models_form_is_text(broken: str) -> None:
    text = f"<tool_call>{broken}</tool_call> and more"
    said, _, calls = divided(HERMES, text, [3, 20, 30])
    assert calls == []
    assert broken in said

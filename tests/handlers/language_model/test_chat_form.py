"""The grammars of calls and of reasoning permit what models of each form write. llguidance and a tokenizer of bytes are real."""

from __future__ import annotations

import json
from typing import Any

import pytest
from constrained_text import accepted, drawn
from pilotflame.handlers.language_model.chat_form import (
    HERMES,
    LLAMA3,
    PLAIN,
    THINK,
    THOUGHT,
    ToolForm,
    call_rules,
    with_reasoning,
)
from pilotflame.handlers.language_model.contract import ToolFunction
from pilotflame.handlers.sampling.grammar import OutputFormat, output_rules
from tiny_tokenizer import WITHOUT_TOOLS, byte_tokenizer

MARKS = ("<tool_call>", "</tool_call>", THINK, THOUGHT)
PLAIN_TOKENS = byte_tokenizer(WITHOUT_TOOLS)
MARKED_TOKENS = byte_tokenizer(WITHOUT_TOOLS, MARKS)
WEATHER = ToolFunction(
    name="weather",
    parameters={
        "type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"], "additionalProperties": False
    },
)  # fmt: skip
CLOCK = ToolFunction(name="clock")
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.mark.parametrize("tokenizer", [PLAIN_TOKENS, MARKED_TOKENS])
def test_a_required_call(tokenizer: Any) -> None:
    tokens = {mark for mark in MARKS if mark in tokenizer.get_vocab()}

    def grammar(several: bool) -> str:
        return "start: answer\n" + call_rules([WEATHER, CLOCK], HERMES, tokens, several=several, must=True)

    assert accepted(tokenizer, grammar(several=True), CALL)
    assert accepted(tokenizer, grammar(several=True), f"{CALL}\n{CALL}")
    assert not accepted(tokenizer, grammar(several=False), f"{CALL}\n{CALL}")
    assert not accepted(tokenizer, grammar(several=True), "text")
    assert not accepted(tokenizer, grammar(several=True), CALL.replace("Ulm", "Bonn"))
    assert not accepted(tokenizer, grammar(several=True), CALL.replace("weather", "clocks"))


def test_a_call_that_is_not_required() -> None:
    grammar = "start: answer\n" + call_rules([WEATHER], HERMES, MARKS, several=True, must=False)
    assert accepted(MARKED_TOKENS, grammar, f"Let me see. {CALL}")
    assert accepted(MARKED_TOKENS, grammar, "It rains.")
    assert not accepted(MARKED_TOKENS, grammar, CALL.replace("Ulm", "Bonn"))
    llama = "start: answer\n" + call_rules([WEATHER], LLAMA3, (), several=True, must=False)
    call = '{"name": "weather", "parameters": {"city": "Ulm"}}'
    assert accepted(PLAIN_TOKENS, llama, call)
    assert accepted(PLAIN_TOKENS, llama, "It rains: {}")
    assert not accepted(PLAIN_TOKENS, llama, call.replace("Ulm", "Bonn"))


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_before_an_answer(begun: bool) -> None:
    rules = output_rules(OutputFormat(choice=("yes",)))
    grammar = with_reasoning(rules, MARKS, begun=begun)
    thought = f"I wonder{THOUGHT}\n\nyes"
    assert accepted(MARKED_TOKENS, grammar, thought if begun else THINK + thought)
    assert accepted(MARKED_TOKENS, grammar, "yes") is not begun
    assert accepted(PLAIN_TOKENS, with_reasoning(rules, (), begun=begun), "yes")


@pytest.mark.parametrize("form", [HERMES, LLAMA3, PLAIN])
def test_a_model_that_knows_nothing_makes_valid_calls(form: ToolForm) -> None:
    grammar = "start: answer\n" + call_rules([WEATHER], form, MARKS, several=False, must=True)
    for seed in range(5):
        text = drawn(MARKED_TOKENS, grammar, seed)
        assert text is not None
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        assert call["name"] == "weather"
        assert call[form.arguments]["city"] in ("Ulm", "Rom")


def test_a_call_of_a_tool_without_parameters_has_no_arguments() -> None:
    grammar = "start: answer\n" + call_rules([CLOCK], PLAIN, (), several=False, must=True)
    assert accepted(PLAIN_TOKENS, grammar, '{"name": "clock", "arguments": {}}')
    assert not accepted(PLAIN_TOKENS, grammar, '{"name": "clock", "arguments": {"a": 1}}')

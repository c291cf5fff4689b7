"""Which grammar an answer gets, by the request and by what is known of the model."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.errors import InputInvalid, OutputInvalid
from pilotflame.handlers.language_model.answer_form import AnswerForms, check_answer
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.language_model.prompts import Prompts
from tiny_tokenizer import HERMES, THINKING, WITHOUT_TOOLS, byte_tokenizer

MARKS = ("<tool_call>", "</tool_call>")
CHAT = [{"role": "user", "content": "Rain?"}]


def tool(*, strict: bool = False) -> dict[str, Any]:
    return {"function": {"name": "weather", "strict": strict}}


def has_constraint(template: str, *, marks: tuple[str, ...] = MARKS, **fields: Any) -> bool:
    tokenizer = byte_tokenizer(template, marks)
    prompts = Prompts(tokenizer, len(tokenizer))
    request = GenerationRequest.model_validate({"messages": CHAT, **fields})
    forms = AnswerForms(tokenizer, prompts, [tokenizer.eos_token_id])
    return forms.constraint(request, prompts.prompt(request, 1000)) is not None


def test_only_what_must_hold_has_a_grammar() -> None:
    assert not has_constraint(HERMES)
    assert not has_constraint(HERMES, tools=[tool()])
    assert has_constraint(HERMES, tools=[tool(strict=True)])
    assert not has_constraint(HERMES, tools=[tool(strict=True)], marks=())
    assert not has_constraint(HERMES, tools=[tool(strict=True)], tool_choice="none")
    assert has_constraint(HERMES, tools=[tool()], tool_choice="required")
    assert has_constraint(WITHOUT_TOOLS, tools=[tool()], tool_choice={"name": "weather"})
    assert has_constraint(THINKING, output={"choice": ["yes"]})
    assert has_constraint(HERMES, output={"grammar": 'start: "x"'})


@pytest.mark.parametrize(
    ("template", "fields", "told"),
    [
        (WITHOUT_TOOLS, {"tools": [tool()]}, "does not show tools"),
        (
            "tools <tool_call><function=",
            {"tools": [tool()], "tool_choice": "required"},
            "No grammar is known",
        ),
        # The marks of Mistral, Granite and DeepSeek. Their calls would arrive as text.
        ("tools [TOOL_CALLS]", {"tools": [tool()]}, "cannot be read"),
        ("tools <|tool_call|>", {"tools": [tool()], "tool_choice": "auto"}, "cannot be read"),
        ("tools <｜tool▁calls▁begin｜>", {"tools": [tool(strict=True)]}, "cannot be read"),
    ],
)
def test_tools_that_a_model_cannot_have(template: str, fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InputInvalid, match=told):
        has_constraint(template, **fields)


def test_a_model_with_calls_of_another_form_makes_required_calls_and_texts() -> None:
    assert has_constraint("tools [TOOL_CALLS]", tools=[tool()], tool_choice="required")
    assert not has_constraint("tools [TOOL_CALLS]", tools=[tool()], tool_choice="none")


def test_a_tokenizer_that_llguidance_cannot_use() -> None:
    class Slow:
        """A tokenizer that is written in Python."""

        chat_template = WITHOUT_TOOLS

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def encode(self, _text: str, *, add_special_tokens: bool) -> list[int]:
            return [0]

    prompts = Prompts(Slow(), 1)
    forms = AnswerForms(Slow(), prompts, [0])
    plain = GenerationRequest(prompt="a")
    assert forms.constraint(plain, prompts.prompt(plain, 1000)) is None
    formed = GenerationRequest.model_validate({"prompt": "a", "output": {"choice": ["a"]}})
    with pytest.raises(InputInvalid, match="Only fast tokenizers"):
        forms.constraint(formed, prompts.prompt(formed, 1000))


@pytest.mark.parametrize(
    ("fields", "good", "wrong"),
    [
        ({"output": {"json_schema": {}}}, ['{"a": 1}', " 7"], ['{"score": 0, ', "", "{} {}"]),
        ({"output": {"choice": ["yes", "no"]}}, ["yes", "no"], ["ye", ""]),
        ({}, ["", "anything"], []),
    ],
)
def test_an_answer_that_has_ended_has_the_promised_format(
    fields: dict[str, Any], good: list[str], wrong: list[str]
) -> None:
    request = GenerationRequest(prompt="a", **fields)
    for text in good:
        check_answer(request, text, called=False)
    for text in wrong:
        with pytest.raises(OutputInvalid, match="format"):
            check_answer(request, text, called=False)


@pytest.mark.parametrize(
    "output",
    [
        {"regex": "[a-z]+-[0-9]{2}"},
        {"grammar": 'start: /[a-z]+/ "-" /[0-9]{2}/'},
        {"grammar": 'root ::= [a-z]+ "-" [0-9] [0-9]'},
    ],
)
def test_an_answer_that_a_stop_has_cut_matches_its_pattern(output: dict[str, str]) -> None:
    tokenizer = byte_tokenizer(HERMES)
    forms = AnswerForms(tokenizer, Prompts(tokenizer, len(tokenizer)), [tokenizer.eos_token_id])
    asked: dict[str, Any] = {"prompt": "a", "output": output}
    request = GenerationRequest(**asked, stop=["x"], stop_token_ids=[7])
    for good in ("ab-12", "\n\nab-12"):
        forms.check(request, good, called=False, cut=[1])
    for wrong in ("ab-1", "", "ab-123", "AB-12"):
        with pytest.raises(OutputInvalid, match="format"):
            forms.check(request, wrong, called=False, cut=[1])
    # No stop has cut this answer, so the grammar has held at each token, and the text is not checked.
    forms.check(request, "ab", called=False)
    # These texts lack bytes or tokens of their answers, so they are not checked.
    forms.check(request, "ab\ufffd", called=False, cut=[1])
    forms.check(request, "ab", called=False, cut=[1, tokenizer.eos_token_id])


def test_an_answer_that_must_be_a_call_is_one() -> None:
    request = GenerationRequest.model_validate(
        {"messages": CHAT, "tools": [tool()], "tool_choice": "required"}
    )
    check_answer(request, "", called=True)
    with pytest.raises(OutputInvalid, match="call"):
        check_answer(request, '{"name": "wea', called=False)

"""The text of an answer is divided into text, reasoning and calls, however it is cut into pieces."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.language_model.answer_parts import AnswerParts
from pilotflame.handlers.language_model.chat_form import THINK, ChatForm
from pilotflame.handlers.language_model.contract import Delta
from tiny_tokenizer import HERMES, LLAMA, THINKING, WITHOUT_TOOLS, byte_tokenizer

known = functools.cache(byte_tokenizer)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln <b>"}}\n</tool_call>'
WANTED = ("weather", {"city": "Köln <b>"})
BARE = '{"name": "weather", "%s": {"city": "Köln <b>"}}'
TAGGED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln <b>\n</parameter>\n</function>\n</tool_call>"
)


def deltas(template: str, pieces: list[str], before: str = "") -> tuple[list[Delta], AnswerParts]:
    """Return a delta for each piece of an answer, and one for its end."""
    tokenizer = known(template)
    form = ChatForm.of(template)
    parser = tokenizer.get_response_parser(form.template(tools=True), prefix=before)
    parts, found = AnswerParts(parser, form.tools.arguments if form.tools else None), list[Delta]()
    for piece in pieces:
        found.append(Delta())
        parts.push(piece, found[-1])
    found.append(Delta())
    parts.finish(found[-1])
    return found, parts


def divided(template: str, text: str, cuts: list[int] | None = None, before: str = "") -> Any:
    """Return the text, the reasoning and the calls of an answer that comes in pieces."""
    borders = sorted({0, *[cut % (len(text) + 1) for cut in cuts or []], len(text)})
    pieces = [text[begin:end] for begin, end in zip(borders, [*borders[1:], len(text)], strict=True)]
    found, parts = deltas(template, pieces, before)
    calls: list[tuple[str, str]] = []
    for one in found:
        if one.arguments:
            calls[-1] = (calls[-1][0], calls[-1][1] + one.arguments)
        calls += [(call.name, call.arguments) for call in one.tool_calls]
    ended = "".join(one.text for one in found), "".join(one.reasoning for one in found), calls
    return *ended, (parts.called, parts.valid)


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
    found, reasoning, called, ends = divided(template, text, cuts)
    assert (found.rstrip(), reasoning) == (said, thought)
    assert [(name, json.loads(arguments)) for name, arguments in called] == calls
    assert ends == (bool(calls), True)


# Calls with odd spaces, braces in texts and other keys, calls that are no JSON, and texts after calls.
ODD = [
    (HERMES, 'I ask. <tool_call> {"name" : "f",\n"arguments":  {"a": "}{\\\\\\"", "b":[1,{"c":2}] } } </tool_call> So.'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": {"x": "}"}}</tool_call><tool_call>{"name": "g", "arguments": {}}'),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": Ulm]}}</tool_call> and more'),
    (HERMES, f'<tool_call>{{{" " * 2000}"name": "f", "arguments": {{"a": 1}}}}</tool_call>'),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}} and more'),
    (WITHOUT_TOOLS, '{"name": "f", "arguments": {"a": {"b": "ü🔥"}}}'),
    ("tools <tool_call><function=", f"So: {TAGGED}"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "text"), ODD)
@given(cut=st.integers(0, 3000), cuts=st.lists(st.integers(0, 3000), max_size=12))
def test_an_answer_is_the_same_however_it_is_split(
    template: str, text: str, cut: int, cuts: list[int]
) -> None:
    for part in (text, text[:cut]):
        assert divided(template, part, cuts) == divided(template, part)


def test_the_arguments_of_a_call_come_while_the_model_writes_them() -> None:
    found, _ = deltas(HERMES, list(CALL))
    (begin,) = [number for number, delta in enumerate(found) if delta.tool_calls]
    (call,) = found[begin].tool_calls
    assert (call.name, call.arguments) == ("weather", "{")
    # As OpenAI, vLLM sends the name first, and each piece of the arguments as it comes.
    pieces = [delta.arguments for delta in found[begin + 1 :]]
    assert "".join(pieces) == '"city": "Köln <b>"}'
    # The parser holds "<" back, because it may begin the mark.
    assert max(map(len, pieces)) == 2
    assert begin == CALL.index('{"city"')


@pytest.mark.parametrize(
    ("written", "arguments", "ends"),
    [
        ('{"a": Ulm}}</tool_call>', '{"a": Ulm}', (True, False)),
        ('{"a": "Ul', '{"a": "Ul', (False, False)),
        ('{"a": 1}', '{"a": 1}', (False, True)),
        ('{"a": 1}}', '{"a": 1}', (True, True)),
        ('{"a": ' + "[" * 5000 + "]" * 5000 + "}}", '{"a": ' + "[" * 5000 + "]" * 5000 + "}", (True, True)),
    ],
)
def test_arguments_that_went_wrong_are_what_the_model_wrote(
    written: str, arguments: str, ends: tuple[bool, bool]
) -> None:
    _, _, calls, found = divided(HERMES, f'<tool_call>{{"name": "f", "arguments": {written}')
    assert (calls, found) == ([("f", arguments)], ends)


def test_text_after_a_call_that_has_no_mark_is_text() -> None:
    said, _, calls, _ = divided(LLAMA, '{"name": "f", "parameters": {}}\n and more')
    assert (said, calls) == ("and more", [("f", "{}")])


def test_reasoning_that_the_chat_template_has_begun() -> None:
    assert divided(THINKING, "hm</think>yes", before=THINK) == ("yes", "hm", [], (False, True))


@pytest.mark.parametrize(
    "broken", ['{"name": "weather", "arguments": [', '{"nam": 1}', "[1]", '{"name": "x"}']
)
def test_a_call_that_is_not_in_the_models_form_is_text(broken: str) -> None:
    said, _, calls, ends = divided(HERMES, f"<tool_call>{broken}</tool_call> and more", [3, 20, 30])
    assert (calls, ends) == ([], (False, True))
    assert broken in said
    assert said.endswith("and more")

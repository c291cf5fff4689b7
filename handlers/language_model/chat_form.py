"""How a model writes its answers to chats: the marks of reasoning, and the form of calls of tools."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sampling.grammar import json_rule, text_rule
from .contract import ToolFunction

ResponseTemplate = Mapping[str, Any]
"""How transformers' ResponseParser reads an answer. This module uses its fields content, reasoning_content and tool_calls."""
THINK, THOUGHT = "<think>", "</think>"
_ANY = r"/(.|\n)*/"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_REASONING = {"open": THINK, "close": THOUGHT, "content": "text"}


@dataclass(frozen=True)
class ToolForm:
    """The form of a call: first `begin`, then a JSON object with the tool's name and its arguments, then `end`."""

    begin: tuple[str, ...]
    """Marks and the texts between them. A mark may be one token of the model."""
    end: tuple[str, ...]
    arguments: str
    """The key of the arguments."""
    several: bool
    """True if an answer may have several calls."""
    opens: str
    """The pattern before the JSON object, for the parser."""

    @property
    def field(self) -> dict[str, Any]:
        """The field of a response template that returns the calls as texts, while they come."""
        read = {"open_pattern": self.opens, "repeats": True, "content": "text"}
        return read | ({"close": self.end[-1]} if self.end else {})


HERMES = ToolForm(("<tool_call>", "\n"), ("\n", "</tool_call>"), "arguments", True, r"\s*<tool_call>")
"""The form of Hermes and Qwen 2.5 and 3."""
LLAMA3 = ToolForm((), (), "parameters", False, r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{\s*\"name\")")
"""The form of Llama 3: the answer is the call."""
PLAIN = ToolForm((), (), "arguments", False, r"\A\s*(?=\{\s*\"name\")")
"""The form for a model whose chat template shows no form that is known here. A grammar makes the model write it."""
UNREAD = (
    "[TOOL_CALLS]",
    "<|tool_call|>",
    "<｜tool▁call",
    "<|tool_calls_section_begin|>",
    "<|action_start|>",
    "functools[",
)
"""The marks of other forms, such as those of Mistral, Granite, DeepSeek, Kimi, InternLM and Phi 4."""
# The form of Qwen 3 Coder and 3.5, which is no JSON.
_TAGGED = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
}


@dataclass(frozen=True)
class ChatForm:
    """The form of a model's answers to chats."""

    tools: ToolForm | None
    """The form of the model's calls, if a grammar can require this form; else None."""
    shows_tools: bool
    """True if the chat template tells the model which tools there are."""
    thinks: bool
    """True if the model may write its reasoning between the marks THINK and THOUGHT."""
    declared: ResponseTemplate | None = None
    """The template that the tokenizer's authors have written."""
    unread: str = ""
    """The mark of the model's own calls if they have a form that is not known here."""

    @classmethod
    def of(cls, chat_template: object, declared: ResponseTemplate | None = None) -> ChatForm:
        """Recognise the form by the chat template, which is a text, or several texts by name."""
        text = str(chat_template or "")
        read = (declared or {}).get("fields", {})
        thinks = THINK in str(read) if read else THINK in text or THOUGHT in text
        form = _tool_form(text, read)
        unread = "" if read or form is not PLAIN else next((mark for mark in UNREAD if mark in text), "")
        return cls(form, "tools" in text, thinks, declared, unread)

    def template(self, *, tools: bool) -> ResponseTemplate | None:
        """Return how to read an answer of a request with or without tools. None: all of it is text."""
        if self.declared is not None:
            calls = {"tool_calls": self.tools.field} if self.tools else {}
            return {**self.declared, "fields": {**self.declared["fields"], **calls}}
        fields: dict[str, Any] = {"reasoning_content": _REASONING} if self.thinks else {}
        if tools:
            fields["tool_calls"] = _TAGGED if self.tools is None else self.tools.field
        if not fields:
            return None
        return {"start_anchor_pattern": r"\A", "fields": fields | {"content": {"content": "text"}}}


def _tool_form(text: str, read: Mapping[str, Any]) -> ToolForm | None:
    if read:
        calls = read.get("tool_calls", {})
        opens = str(calls.get("open", calls.get("open_pattern", "")))
        plain = calls.get("content") == "json" and not calls.get("content_args")
        return HERMES if plain and opens.endswith("<tool_call>") else None
    if "<tool_call>" in text:
        return HERMES if "<function=" not in text else None
    if "<|python_tag|>" in text or ('"parameters"' in text and "<|start_header_id|>" in text):
        return LLAMA3
    return PLAIN


def call_rules(
    tools: Sequence[ToolFunction], form: ToolForm, tokens: Collection[str], *, several: bool, must: bool
) -> str:
    """Return the rules of an answer that calls one of these tools, or is a text if it does not have to call one.

    `tokens` are the marks that are one token of the model. The first rule is `answer`.
    """
    begin, end = _marks(form.begin, tokens), _marks(form.end, tokens)
    calls = r'call ("\n" call)*' if several and form.several else "call"
    if not must:
        # Without a mark, an answer that begins like a call must be a call.
        calls = f"{_ANY} ({calls})?" if form.begin else r"call | /([^{\s](.|\n)*)?/"
    rules = [f"answer: {calls}", f"call: {begin} object {end}"]
    rules.append(f"object: {' | '.join(f'tool_{number}' for number in range(len(tools)))}")
    for number, tool in enumerate(tools):
        head = text_rule(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
        rules.append(f"tool_{number}: {head} arguments_{number} {text_rule('}')}")
        rules.append(f"arguments_{number}: {json_rule(tool.arguments if tool.parameters else _NO_ARGUMENTS)}")
    return "\n".join(rules)


def with_reasoning(rules: str, tokens: Collection[str], *, begun: bool) -> str:
    """Return a grammar of `answer`, before which a model may write its reasoning. `begun` is True if the prompt has begun the reasoning."""
    if not {THINK, THOUGHT} <= set(tokens):
        return f"start: answer\n{rules}"
    begin = "" if begun else THINK
    return (
        f"start: reasoning{'' if begun else '?'} answer\nreasoning: {begin} {_ANY} {THOUGHT} /\\s*/\n{rules}"
    )


def _marks(pieces: Sequence[str], tokens: Collection[str]) -> str:
    return " ".join(piece if piece in tokens else text_rule(piece) for piece in pieces)

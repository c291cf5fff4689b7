"""Divides the text of an answer into what the caller reads, the reasoning before it, and calls of tools."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .contract import Delta, ToolCall

_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass
class Parts:
    """What a piece of text is."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class AnswerParts:
    """The parts of one answer, as its text comes. The parser is transformers' ResponseParser."""

    def __init__(self, parser: Any) -> None:
        self._parser: Any = parser
        self._open = ""
        """The text of a call whose end is still to come."""
        self._begun = False
        """True if the caller got some text. Spaces before it are the border of another part."""
        self.called = False
        """True if the answer has a call of a tool."""

    def push(self, text: str) -> Parts:
        """Add a piece of the answer's text, and return the parts that are certain now."""
        if self._parser is None:
            return Parts(text)
        try:
            return self._parts(self._parser.feed(text))
        except (ValueError, KeyError):
            return self._unread(text)

    def finish(self) -> Parts:
        """Return the rest."""
        if self._parser is None:
            return Parts()
        try:
            _, events = self._parser.finalize()
            return self._parts(events)
        except (ValueError, KeyError):
            return self._unread("")

    def _unread(self, text: str) -> Parts:
        """Return a call that is not in the model's own form as text, and read no further ones."""
        self._parser, found = None, self._open + text
        return Parts(found)

    def _parts(self, events: Iterable[dict[str, Any]]) -> Parts:
        parts = Parts()
        for event in events:
            name, kind = event["field"], event["type"]
            if kind == "region_close" and name == "tool_calls":
                parts.calls += [_call(one) for one in _several(event["value"])]
                self._open, self.called = "", True
            elif kind == "region_chunk" and name == "tool_calls":
                self._open += event["text"]
            elif kind == "region_chunk" and name in _REASONING:
                parts.reasoning += event["text"]
            elif kind == "region_chunk" and name == "content":
                parts.text += event["text"] if self._begun else event["text"].lstrip()
                self._begun = self._begun or bool(parts.text)
        return parts


def add_text(delta: Delta, text: str, parts: AnswerParts | None, *, last: bool = False) -> None:
    """Add a piece of an answer's text to the delta. `parts` reads the answer; None: all of it is text."""
    if parts is None:
        delta.text += text
        return
    for found in (parts.push(text), *([parts.finish()] if last else [])):
        delta.text += found.text
        delta.reasoning += found.reasoning
        delta.tool_calls += found.calls


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(value: Any) -> ToolCall:
    function = value["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{secrets.token_hex(12)}", name=str(function["name"]), arguments=arguments)

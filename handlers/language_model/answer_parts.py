"""Divides the text of an answer into what the caller reads, the reasoning before it, and calls of tools."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import Any

from .contract import Delta, ToolCall

_REASONING = ("reasoning_content", "reasoning", "thinking")
MOST_HEAD = 1000
"""A call is returned as a whole at its end if its name and the key of its arguments are not within this many characters."""
_HEAD = r'\s*\{\s*"name"\s*:\s*"([\w.-]{1,64})"\s*,\s*"%s"\s*:\s*(?=\{)'
_NESTS = {"{": 1, "[": 1, "}": -1, "]": -1}


class AnswerParts:
    """The parts of one answer, as its text comes. The parser is transformers' ResponseParser."""

    def __init__(self, parser: Any, key: str | None = None) -> None:
        """`key` is the key of the arguments, if a call is a JSON object that the parser returns as text. None: the parser reads calls."""
        self._parser: Any = parser
        self._key = key
        self._call: _CallText | None = None
        """The call whose text is being read."""
        self._open = ""
        """The text so far of a call that the parser reads and that has not ended."""
        self._begun = False
        """True if the caller got some text. Spaces before the first text are left out, because they separate it from another part."""
        self.called = False
        """True if the answer has a complete call of a tool."""
        self.valid = True
        """False if the arguments of a call are no JSON object, for example because a stop string has cut them."""

    def push(self, text: str, to: Delta) -> None:
        """Read a piece of the answer's text, and add the parts that are certain now to a delta."""
        if self._parser is None:
            to.text += text
            return
        try:
            self._read(self._parser.feed(text), to)
        except (ValueError, KeyError):
            self._read_no_further(text, to)

    def finish(self, to: Delta) -> None:
        """Add the rest of the answer to a delta."""
        if self._parser is None:
            return
        try:
            _, events = self._parser.finalize()
            self._read(events, to)
        except (ValueError, KeyError):
            self._read_no_further("", to)

    def _read_no_further(self, text: str, to: Delta) -> None:
        """Add a call that is not in the model's own form to a delta as text. The rest of the answer will be text, too."""
        self._parser = None
        to.text += self._open + text

    def _read(self, events: Iterable[dict[str, Any]], to: Delta) -> None:
        for event in events:
            name, kind = event["field"], event["type"]
            if name == "tool_calls" and self._key is not None:
                self._read_text(kind, event, self._key, to)
            elif kind == "region_close" and name == "tool_calls":
                to.tool_calls += [_call(one) for one in _several(event["value"])]
                self._open, self.called = "", True
            elif kind == "region_chunk" and name == "tool_calls":
                self._open += event["text"]
            elif kind == "region_chunk" and name in _REASONING:
                to.reasoning += event["text"]
            elif kind == "region_chunk" and name == "content":
                text = event["text"] if self._begun else event["text"].lstrip()
                self._begun = self._begun or bool(text)
                to.text += text

    def _read_text(self, kind: str, event: dict[str, Any], key: str, to: Delta) -> None:
        """Read an event of a call that the parser returns as text."""
        call = self._call = self._call or _CallText(key)
        if kind == "region_chunk":
            call.push(event["text"], to)
        elif kind == "region_close":
            self._call = None
            self.called = call.finish(to) or self.called
            self.valid = self.valid and call.valid


class _CallText:
    """The JSON object of a call, as its text comes. The arguments are what the model writes, and may be no JSON."""

    def __init__(self, key: str) -> None:
        """`key` is the key of the arguments."""
        self._key, self._head = key, re.compile(_HEAD % key)
        self._held = ""
        """The text of the call until it shows the tool's name and the key of the arguments."""
        self._arguments: list[str] | None = None
        """The pieces of the arguments; None until they begin."""
        self._depth, self._in_string, self._escaped = 1, False, False
        self._complete = False
        """True if the arguments have ended."""
        self._followed = False
        """True if there is text after the object."""

    def push(self, text: str, to: Delta) -> None:
        """Read a piece of the text. Add to a delta what the piece shows: the call, more of its arguments, or the text after the call."""
        if self._arguments is None:
            self._held += text
            if (found := self._head.match(self._held[:MOST_HEAD])) is None:
                return
            to.tool_calls.append(_new_call(found[1], ""))
            self._arguments, text = [], self._held[found.end() :]
        arguments, after = self._divided(text)
        self._arguments.append(arguments)
        if to.tool_calls:
            to.tool_calls[-1].arguments += arguments
        else:
            to.arguments += arguments
        after = after if self._followed else after.lstrip()
        self._followed = self._followed or bool(after)
        to.text += after

    def finish(self, to: Delta) -> bool:
        """Add the rest of the text to a delta. Return True if the text was a complete call."""
        if self._arguments is not None:
            return not self._depth
        try:
            found = json.loads(self._held)
            to.tool_calls.append(_new_call(found["name"], found[self._key]))
        except (ValueError, KeyError, TypeError, RecursionError):
            to.text += self._held
            return False
        return True

    @property
    def valid(self) -> bool:
        """False if the call has begun, and its arguments are no JSON object."""
        try:
            # Keep whole numbers as text, because a number may have more digits than Python converts.
            json.loads("{}" if self._arguments is None else "".join(self._arguments), parse_int=str)
        except RecursionError:
            return True
        except ValueError:
            return False
        return True

    def _divided(self, text: str) -> tuple[str, str]:
        """Return the part of a piece that belongs to the arguments, and the part after the object of the call."""
        end = 0
        for at, char in enumerate(text):
            if not self._depth:
                return text[:end], text[at:]
            self._nest(char)
            if not self._complete:
                end, self._complete = at + 1, self._depth == 1
        return text[:end], ""

    def _nest(self, char: str) -> None:
        """Update the depth of the JSON by a character."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped, self._in_string = char == "\\", char != '"'
        elif char == '"':
            self._in_string = True
        else:
            self._depth += _NESTS.get(char, 0)


def add_text(delta: Delta, text: str, parts: AnswerParts | None, *, last: bool = False) -> None:
    """Add a piece of an answer's text to the delta. `parts` reads the answer; None: all of it is text."""
    if parts is None:
        delta.text += text
        return
    parts.push(text, delta)
    if last:
        parts.finish(delta)


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _call(value: Any) -> ToolCall:
    return _new_call(value["function"]["name"], value["function"]["arguments"])


def _new_call(name: Any, arguments: Any) -> ToolCall:
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=f"call_{secrets.token_hex(12)}", name=str(name), arguments=arguments)

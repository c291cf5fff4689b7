"""Makes the grammar of an answer, in the Lark form of llguidance, from the tools or the output format of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

from ...errors import InputInvalid
from .chat_form import THINK, THOUGHT, ToolForm
from .contract import OutputFormat, ToolFunction

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON has the spaces of Python's json.dumps. If a model could choose them, it could write spaces without end."""
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_ANY = r"/(.|\n)*/"
_EBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
MOST_EBNF_CHARS, MOST_EBNF_RULES = 64 << 10, 1000
"""The translation from EBNF is Python, and takes minutes for a larger grammar."""
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def output_rules(output: OutputFormat) -> str:
    """Return the rules of an answer in this format. The first one is `answer`."""
    if output.json_schema is not None:
        return f"answer: {_json(output.json_schema)}"
    if output.choice is not None:
        return f"answer: {' | '.join(map(_text, output.choice))}"
    # The pattern may have escaped them already.
    pattern = re.sub(r"\\(?s:.)|/|\n", lambda found: _ESCAPED.get(found[0], found[0]), output.regex or "")
    return f"answer: /{pattern}/"


def lark_of(grammar: str) -> str:
    """Return a grammar in the Lark form: as it is, or translated from the EBNF form of llama.cpp and xgrammar. Raise InputInvalid."""
    if not _EBNF_RULE.search(grammar):
        return grammar
    if len(grammar) > MOST_EBNF_CHARS or grammar.count("::=") > MOST_EBNF_RULES:
        raise InputInvalid(
            f"The grammar has more than {MOST_EBNF_CHARS} characters or {MOST_EBNF_RULES} rules of EBNF.",
            remedy="Send a smaller grammar, or send it in the Lark form.",
        )
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark  # noqa: PLC0415  it may not be installed

        return str(gbnf_to_lark(grammar))
    except Exception as error:
        # The translation raises what it likes.
        raise InputInvalid(
            f"The grammar cannot be translated from EBNF: {error}",
            remedy="Name its first rule root, or send it in the Lark form.",
        ) from error


def call_rules(
    tools: Sequence[ToolFunction], form: ToolForm, tokens: Collection[str], *, several: bool, must: bool
) -> str:
    """Return the rules of an answer that calls one of these tools, or is a text if it does not have to call one.

    `tokens` are the marks that are one token of the model. The first rule is `answer`.
    """
    begin, end = _marks(form.begin, tokens), _marks(form.end, tokens)
    calls = r'call ("\n" call)*' if several and form.several else "call"
    if not must:
        # Without a mark, an answer that begins as a call is one.
        calls = f"{_ANY} ({calls})?" if form.begin else r"call | /([^{\s](.|\n)*)?/"
    rules = [f"answer: {calls}", f"call: {begin} object {end}"]
    rules.append(f"object: {' | '.join(f'tool_{number}' for number in range(len(tools)))}")
    for number, tool in enumerate(tools):
        head = _text(f'{{"name": {json.dumps(tool.name)}, "{form.arguments}": ')
        rules.append(f"tool_{number}: {head} arguments_{number} {_text('}')}")
        rules.append(f"arguments_{number}: {_json(tool.arguments if tool.parameters else _NO_ARGUMENTS)}")
    return "\n".join(rules)


def with_reasoning(rules: str, tokens: Collection[str], *, begun: bool) -> str:
    """Return a grammar of `answer`, which a model may begin with its reasoning. `begun`: the prompt has begun it."""
    if not {THINK, THOUGHT} <= set(tokens):
        return f"start: answer\n{rules}"
    begin = "" if begun else THINK
    return (
        f"start: reasoning{'' if begun else '?'} answer\nreasoning: {begin} {_ANY} {THOUGHT} /\\s*/\n{rules}"
    )


def _json(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(schema | {"x-guidance": _COMPACT})


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _marks(pieces: Sequence[str], tokens: Collection[str]) -> str:
    return " ".join(piece if piece in tokens else _text(piece) for piece in pieces)

"""The format that a request sets for the text of an answer, and its grammar in the Lark form of llguidance."""

from __future__ import annotations

import json
import re
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...errors import InputInvalid

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Fixes the spaces in JSON, as in Python's json.dumps. If a model could choose them, it could write spaces without end."""
_ESCAPED = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_EBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
MOST_EBNF_CHARS, MOST_EBNF_RULES = 64 << 10, 1000
"""Larger grammars in EBNF are refused, because their translation, which is in Python, would take minutes."""


class OutputFormat(BaseModel):
    """What the text of an answer must be. It has one of these fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    json_schema: dict[str, Any] | None = Field(None, description="A value that fits this JSON schema.")
    regex: str | None = Field(None, min_length=1, description="A text that matches.")
    choice: tuple[str, ...] | None = Field(None, min_length=1, description="One of these texts.")
    grammar: str | None = Field(None, min_length=1, description="A text of this grammar, in Lark or EBNF.")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if len(self.model_dump(exclude_none=True)) != 1:
            raise ValueError("give one of json_schema, regex, choice and grammar")
        return self


def output_rules(output: OutputFormat) -> str:
    """Return the rules of an answer in this format. The first one is `answer`."""
    if output.json_schema is not None:
        return f"answer: {json_rule(output.json_schema)}"
    if output.choice is not None:
        return f"answer: {' | '.join(map(text_rule, output.choice))}"
    # Escape slashes and line breaks for Lark, unless the pattern has escaped them already.
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
        # The translation may raise any exception.
        raise InputInvalid(
            f"The grammar cannot be translated from EBNF: {error}",
            remedy="Name its first rule root, or send it in the Lark form.",
        ) from error


def json_rule(schema: dict[str, Any]) -> str:
    """Return the right side of a rule: a JSON value that fits the schema."""
    return "%json " + json.dumps(schema | {"x-guidance": _COMPACT})


def text_rule(text: str) -> str:
    """Return the right side of a rule: this text."""
    return json.dumps(text, ensure_ascii=False)

"""An answer has only the tokens that its grammar permits. llguidance and a tokenizer of bytes are real."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import llguidance.hf
import pytest
import torch
from constrained_text import accepted, drawn
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import InputInvalid
from pilotflame.handlers.sampling.constraint import Constraint, Constraints
from pilotflame.handlers.sampling.grammar import OutputFormat, lark_of, output_rules
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.handlers.sampling.sampling import Sampling
from tiny_tokenizer import WITHOUT_TOOLS, byte_tokenizer

PLAIN_TOKENS = byte_tokenizer(WITHOUT_TOOLS)


FORMATS = [
    (OutputFormat(json_schema={"type": "object"}), '{"a": [1, 2]}', "[]"),
    (OutputFormat(json_schema={"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}), '{"a": 1}', '{"a": "1"}'),
    (OutputFormat(choice=("yes", 'no "ü"\n')), 'no "ü"\n', "maybe"),
    (OutputFormat(regex="[a-z]+/[0-9]+\n"), "abc/12\n", "abc"),
]  # fmt: skip


@pytest.mark.parametrize(("output", "good", "bad"), FORMATS)
def test_output_formats(output: OutputFormat, good: str, bad: str) -> None:
    grammar = f"start: answer\n{output_rules(output)}"
    assert accepted(PLAIN_TOKENS, grammar, good)
    assert not accepted(PLAIN_TOKENS, grammar, bad)


SCHEMAS = st.recursive(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": ["a", 'b"', "ü"]}, {"type": "integer", "minimum": 0, "maximum": 9}]),
    lambda inner: st.dictionaries(st.text("abc \"'/ü", min_size=1, max_size=4), inner, min_size=1, max_size=3).map(
        lambda fields: {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
    ),
    max_leaves=4,
)  # fmt: skip


@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_every_answer_fits_its_schema(schema: dict[str, Any], seed: int) -> None:
    text = drawn(PLAIN_TOKENS, f"start: answer\n{output_rules(OutputFormat(json_schema=schema))}", seed)
    assert text is not None
    assert fits(json.loads(text), schema)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        fields = schema["properties"]
        return value.keys() == fields.keys() and all(fits(value[name], fields[name]) for name in fields)
    return isinstance(value, {"boolean": bool, "null": type(None), "integer": int}[schema["type"]])


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "a', "start: answer\nanswer: /[/", 'start: answer\nanswer: %json {"type": "nothing"}',
        'start: answer\nanswer: %json {"$ref": "http://localhost/x"}',
    ],
)  # fmt: skip
def test_a_grammar_that_is_not_valid(grammar: str) -> None:
    with pytest.raises(InputInvalid, match="cannot be used"):
        Constraints(PLAIN_TOKENS, [PLAIN_TOKENS.eos_token_id]).new(grammar)


def test_an_answer_whose_grammar_is_complete_ends_despite_min_tokens() -> None:
    constraint = Constraints(PLAIN_TOKENS, [PLAIN_TOKENS.eos_token_id]).new('start: "ab"')
    sampler = Sampler(Sampling(temperature=0.0, min_tokens=9), (), [PLAIN_TOKENS.eos_token_id], constraint)
    logits = torch.randn(len(PLAIN_TOKENS))
    assert PLAIN_TOKENS.decode([sampler.choose(logits)[0] for _ in range(2)]) == "ab"
    assert sampler.complete


def test_a_model_without_an_end_token() -> None:
    tokenizer = byte_tokenizer(WITHOUT_TOOLS)
    tokenizer.eos_token = None
    constraint = Constraints(tokenizer, []).new('start: "ab"')
    for token in tokenizer.encode("ab"):
        assert not constraint.complete
        constraint.accept(token)
    assert constraint.complete
    assert not constraint.copy().mask(torch.zeros(len(tokenizer)))[tokenizer.encode("a")[0]].isfinite()


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        ({"max_items_in_row": 10}, "Current row has"),
        ({"step_max_items": 20}, "Too many items"),
        ({"max_lexer_states": 3}, "too many states"),
    ],
)
def test_a_limit_of_llguidance_that_shows_late_is_the_requests_fault(
    limit: dict[str, Any], reason: str
) -> None:
    tokens = llguidance.hf.from_tokenizer(PLAIN_TOKENS)
    grammar = llguidance.LLMatcher.grammar_from_lark('start: s\ns: s s | "a" | s "b" s')
    limits = llguidance.LLParserLimits(**limit)
    constraint = Constraint(llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits))
    (a,) = PLAIN_TOKENS.encode("a")

    def write() -> None:
        for _ in range(20):
            constraint.mask(torch.zeros(len(PLAIN_TOKENS)))
            constraint.accept(a)

    with pytest.raises(InputInvalid, match=f"cannot be used: .*{reason}"):
        write()


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"a\/b", "a/b"), ("a/b", "a/b"), (r"\\/", "\\/"), ("a\nb", "a\nb"), (r"[\/]+", "//")],
)
def test_a_slash_in_a_pattern_may_be_escaped(pattern: str, text: str) -> None:
    assert accepted(PLAIN_TOKENS, "start: answer\n" + output_rules(OutputFormat(regex=pattern)), text)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"score": {}}, "patternProperties": {"^score$": {}}, "additionalProperties": False},
        {"type": "array", "items": {"anyOf": [{"properties": {"ab": {}}, "patternProperties": {"b": {}}}]}},
    ],
)  # fmt: skip
def test_a_property_that_is_also_a_pattern_is_refused(schema: dict[str, Any]) -> None:
    check = Constraints(PLAIN_TOKENS, [PLAIN_TOKENS.eos_token_id]).check_properties
    with pytest.raises(InputInvalid, match="patternProperties"):
        check(schema)
    check({"properties": {"properties": {}, "patternProperties": {}}})
    check({"properties": {"a": {}}, "patternProperties": {"^b": {}, "c$": {}}})
    check({"properties": {"a" * 200: {}}, "patternProperties": {"^(a+)+b$": {}, "[": {}}})
    check({"properties": {}, "patternProperties": {}})


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= [0-9]+ ("," [0-9]+)*', "1,22", "a"),
        ('word ::= "a" | "b"\nroot ::= word{2,3} # two or three', "aba", "a"),
        ('root ::= "start: " [^\\n]* "\\n"', "start: x\n", "x"),
        ('start: "a" | "b"', "b", "c"),
        ('start: "a ::= b"', "a ::= b", "a"),
    ],
)
def test_grammars_in_lark_and_ebnf(grammar: str, good: str, bad: str) -> None:
    assert accepted(PLAIN_TOKENS, lark_of(grammar), good)
    assert not accepted(PLAIN_TOKENS, lark_of(grammar), bad)


@pytest.mark.parametrize(
    "grammar", ["root ::= nope", 'start ::= "a"', "root ::= (", "::=", "root ::= " + "(" * 5000]
)
def test_an_ebnf_grammar_that_cannot_be_used_is_the_requests_fault(grammar: str) -> None:
    with pytest.raises(InputInvalid):
        Constraints(PLAIN_TOKENS, [PLAIN_TOKENS.eos_token_id]).new(lark_of(grammar))


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= r0\n" + "\n".join(f'r{number} ::= "a"' for number in range(1000)),
        f'root ::= "{"a" * (64 << 10)}"',
    ],
)
def test_a_large_ebnf_grammar_is_refused_before_its_translation(
    grammar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llguidance.gbnf_to_lark.gbnf_to_lark", lambda _: pytest.fail("translated"))
    with pytest.raises(InputInvalid, match="65536 characters or 1000 rules"):
        lark_of(grammar)

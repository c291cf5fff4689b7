"""Records of calls: redaction of any JSON, pointers, and content that is left out."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.settings.request_log import parts_of
from pilotflame.runtime.ground.telemetry.invocation_end import InvocationEnd
from pilotflame.runtime.ground.telemetry.timeline import Timeline
from pilotflame.runtime.plugins.request_log.records import (
    REDACTED,
    LoggedCall,
    Redactor,
    find,
    record_of,
)

NAMES = st.sampled_from(["password", "Password", "name", "*", "0", "a/b", "input"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("xy", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=20,
)
RULES = st.lists(
    st.sampled_from(
        ["password", "name", "/input", "/input/*", "/output/0/name", "/input/a~1b", "/output/*/*"]
    ),
    max_size=3,
)


class Request:
    def __init__(self, body: bytes, content_type: str = "") -> None:
        self.body, self.content_type = body, content_type


def ended(
    body: bytes, output: tuple[bytes, str] | None = (b"1", ""), content_type: str = ""
) -> InvocationEnd:
    call = Request(body, content_type)
    return InvocationEnd("tone", "r1", "q1", "http", Timeline(0.0), call=call, output=output)


def below(value: Any, name: str) -> list[Any]:
    """Return the values of all fields of this name."""
    if isinstance(value, list):
        return [found for each in value for found in below(each, name)]
    if isinstance(value, dict):
        own = [each for key, each in value.items() if key.casefold() == name]
        return own + [found for each in value.values() for found in below(each, name)]
    return []


@given(VALUES, VALUES, RULES)
def test_no_redacted_value_is_left_and_others_stay(given_: Any, made: Any, rules: list[str]) -> None:
    record = {"function": "tone", "input": given_, "output": made}
    before = copy.deepcopy(record)
    Redactor(rules).redact(record)
    for rule in rules:
        found = (
            list(find(record, parts_of(rule)))
            if rule.startswith("/")
            else below([record["input"], record["output"]], rule)
        )
        assert all(each == REDACTED for each in found), rule
    assert record["function"] == "tone"
    if not any(rule.startswith("/") for rule in rules) and not below([given_, made], "password") + below(
        [given_, made], "name"
    ):
        assert record == before


@pytest.mark.parametrize(
    ("pointer", "values"),
    [
        ("/input/a/1", [2]),
        ("/input/a/*", [1, 2]),
        ("/input/a~1b/~0c", [3]),
        ("/input/a/2", []),
        ("/input/a/-1", []),
        ("/input/a/0000000002", []),
        ("/input/a/99999999999999999999", []),
        ("/input/none/x", []),
        ("/input/#", []),
    ],
)
def test_a_pointer_finds_its_values(pointer: str, values: list[int]) -> None:
    assert list(find({"input": {"a": [1, 2], "a/b": {"~c": 3}}}, parts_of(pointer))) == values


@pytest.mark.parametrize(
    ("body", "content_type", "kept"),
    [
        (b'{"a":1}', "", True),
        (b'{"a":1}', "application/json; charset=utf-8", True),
        (b'{"a":1}', "application/vnd.api+json", True),
        (b'{"a":1}', "text/plain", False),
        (b"not JSON", "", False),
        (b"", "", False),
        # This body has 256 KiB with its quotation marks, which is the limit.
        (b'"%s"' % (b"x" * ((256 << 10) - 2)), "", True),
        (b'"%s"' % (b"x" * ((256 << 10) - 1)), "", False),
    ],
)
def test_only_json_of_limited_size_is_in_a_record(body: bytes, content_type: str, kept: bool) -> None:
    record = record_of(LoggedCall.of(ended(body, content_type=content_type)), Redactor(()))
    assert record["input_bytes"] == len(body)
    assert record["input"] == (json.loads(body) if kept else None)

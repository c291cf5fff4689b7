"""An example that is made from a JSON schema fits the type of the schema."""

from __future__ import annotations

import json
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.example import example_of
from pydantic import BaseModel, Field, TypeAdapter


class Colour(Enum):
    RED = "red"


class Person(BaseModel):
    name: str = Field(min_length=8, max_length=9)
    age: int = Field(ge=18)
    at: datetime
    colour: Colour
    friends: list[Person] = []
    mood: Literal["good", "bad"]
    weight: float | None
    nickname: str = "none"


KINDS: list[Any] = [
    Person, list[Person], dict[str, int], int, bool, str, None, float | str, tuple[int, str], Any,
    Annotated[int, Field(gt=5, lt=7)], Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(lt=0)],
    Annotated[int, Field(multiple_of=7, ge=14)], Annotated[list[int], Field(min_length=3)], Annotated[int, Field(le=-3)],
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_example_fits_its_type(kind: Any) -> None:
    adapter = TypeAdapter(kind)
    adapter.validate_json(json.dumps(example_of(adapter.json_schema())))


@given(st.integers(-50, 50), st.integers(0, 50), st.booleans(), st.booleans())
def test_a_number_is_within_its_limits(least: int, wide: int, has_least: bool, has_most: bool) -> None:
    schema = {"type": "integer"} | ({"minimum": least} if has_least else {})
    schema |= {"maximum": least + wide} if has_most else {}
    found = example_of(schema)
    assert isinstance(found, int)
    assert not has_least or found >= least
    assert not has_most or found <= least + wide


def test_what_the_schema_names_is_used() -> None:
    assert example_of({"type": "string", "examples": ["a", "b"]}) == "a"
    assert example_of({"type": "object", "required": ["n"], "properties": {"n": {"type": "integer", "default": 3}, "m": {}}}) == {"n": 3}  # fmt: skip
    assert example_of({}) == {}


def test_a_schema_that_holds_itself_ends() -> None:
    node = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/N"}}}
    assert example_of({"$ref": "#/$defs/N", "$defs": {"N": node}})["next"]["next"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$ref",
                    "$defs",
                    "type",
                    "enum",
                    "items",
                    "minItems",
                    "minLength",
                    "multipleOf",
                    "required",
                    "anyOf",
                    "a",
                ]
            ),
            inner | st.sampled_from(["object", "array", "string", "integer", "a"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["$ref", "$defs", "type", "enum", "minimum", "properties"]), JSON))
def test_every_schema_has_an_example(schema: dict[str, Any]) -> None:
    json.dumps(example_of(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 4_000_000},
        {"type": "array", "minItems": 100_000_000, "items": {"type": "integer"}},
        {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}] * 1000, "$defs": {"a": {"type": "string"}}},
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"type": "array", "minItems": 8, "items": {"$ref": "#/$defs/a"}}},
        },
        {"default": "x" * 1_000_000},
    ],
    ids=["text", "items", "tuple", "tree", "default"],
)
def test_an_example_is_small(schema: dict[str, Any]) -> None:
    assert len(json.dumps(example_of(schema))) <= 5000

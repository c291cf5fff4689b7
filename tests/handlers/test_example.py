"""Examples from JSON schemas fit the type that the schema is of."""

from __future__ import annotations

import json
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.handlers.example import example_of, example_text
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
    adapter.validate_json(example_text(adapter.json_schema()))


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
    assert json.loads(example_text({})) == {}


def test_a_schema_that_holds_itself_ends() -> None:
    node = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/N"}}}
    assert example_of({"$ref": "#/$defs/N", "$defs": {"N": node}})["next"]["next"]


NODE = {
    "type": "object",
    "required": ["a", "b", "c", "d"],
    "properties": {key: {"$ref": "#/$defs/N"} for key in "abcd"},
}
LARGE: list[Any] = [
    {"type": "string", "minLength": 10**10},
    {"type": "array", "minItems": 10**12},
    {
        "type": "array",
        "items": {"type": "array", "minItems": 1000, "items": {"default": "x" * 1000}},
        "minItems": 1000,
    },
    {"$ref": "#/$defs/N", "$defs": {"N": NODE}},
]
BROKEN: list[Any] = [
    {"examples": 5}, {"type": "object", "required": ["a"], "properties": []}, {"$ref": 1}, {"anyOf": {"a": 1}}, {"$defs": 7, "$ref": "#/$defs/N"},
    {"type": "string", "minLength": "x"}, {"type": "object", "required": [{}]}, {"type": []}, {"type": "number", "multipleOf": "x"},
]  # fmt: skip


@pytest.mark.parametrize("schema", LARGE, ids=range(len(LARGE)))
def test_an_example_is_small_whatever_a_schema_asks_for(schema: Any) -> None:
    """A container reports its schema, and the gateway makes the example of all functions for each list of them."""
    assert len(example_text(schema)) <= 100_000


@pytest.mark.parametrize("schema", BROKEN, ids=str)
def test_what_is_no_schema_has_an_empty_example(schema: Any) -> None:
    assert example_of(schema) == {}

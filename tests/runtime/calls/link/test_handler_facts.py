"""What a zygote reports of its handler is bounded, and has the shapes that the gateway reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pilotflame.errors import LauncherError
from pilotflame.runtime.calls.link.handler_facts import MAX_NOTES, MAX_SCHEMA_BYTES, checked
from pydantic import BaseModel, Field

LARGE = {"description": "x" * MAX_SCHEMA_BYTES}


class Leaf(BaseModel):
    size: int | None = None


class Tree(BaseModel):
    """A class whose schema refers to itself and to another class."""

    text: str = Field(min_length=4_000_000)
    leaves: list[Leaf] = Field(min_length=2)
    trees: list[Tree] = []


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"items": found}
    return found


def test_the_example_is_made_once_and_is_small() -> None:
    found = checked({"kind": "plain", "input_schema": Tree.model_json_schema(), "input_example": "forged"})
    assert found["input_schema"] == Tree.model_json_schema()
    assert found["input_example"] == {"text": "hello".ljust(64, "o"), "leaves": [{}, {}]}
    assert checked({})["input_example"] == {}


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": {"a": 1}},
        {"type": "number", "multipleOf": "2"},
        {"type": ["string"]},
        {"required": 3, "type": "object"},
    ],
    ids=str,
)
def test_a_schema_without_an_example_is_taken(schema: dict[str, Any]) -> None:
    assert checked({"input_schema": schema})["input_example"] == {}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$defs": []}, "$defs"),
        ({"$defs": {"a": 1}}, "$defs.a"),
        ({"properties": "x"}, "properties"),
        ({"$defs": {"a": {"properties": {"b": True}}}}, "$defs.a.properties.b"),
        ({"$ref": 5}, "$ref"),
        ({"title": []}, "title"),
        ({"anyOf": [1]}, "anyOf.0"),
        ({"$defs": {str(number): {} for number in range(1001)}}, "$defs"),
    ],
    ids=str,
)
def test_a_schema_that_the_gateway_cannot_read_is_refused(schema: dict[str, Any], place: str) -> None:
    for name in ("input_schema", "output_schema"):
        with pytest.raises(LauncherError) as found:
            checked({name: schema})
        assert f"{name}.{place}: " in found.value.message
        assert len(found.value.message) < 500


@pytest.mark.parametrize("depth", [300, 900])
def test_a_deep_schema_is_refused(depth: int) -> None:
    with pytest.raises(LauncherError, match="nested"):
        checked({"input_schema": json.loads(json.dumps(nested(depth)))})


@pytest.mark.parametrize("name", ["input_schema", "output_schema"])
def test_a_schema_that_is_not_shown_is_left_out_with_a_note(name: str) -> None:
    found = checked({name: LARGE, "kind": "plain", "notes": ["other"]})
    assert found[name] == {}
    assert found["notes"][0] == "other"
    assert found["notes"][1].startswith(f"{name} is not shown")
    assert checked(found) == found


def test_notes_keep_their_number() -> None:
    found = checked({"input_schema": LARGE, "output_schema": LARGE, "notes": ["x"] * MAX_NOTES})
    assert len(found["notes"]) == MAX_NOTES
    assert checked(found) == found


def test_facts_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(LauncherError, match="batch"):
        checked({"batch": -1})

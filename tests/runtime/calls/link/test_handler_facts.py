"""The facts that a zygote reports: those that cannot be true are refused, and schemas that are too large are left out."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.errors import LauncherError
from pilotflame.runtime.calls.link.handler_facts import MAX_NOTES, MAX_SCHEMA_BYTES, checked

LARGE = {"description": "x" * MAX_SCHEMA_BYTES}


@pytest.mark.parametrize("schema", [LARGE, {"$defs": ["x"]}], ids=["large", "broken"])
@pytest.mark.parametrize("name", ["input_schema", "output_schema"])
def test_a_schema_that_is_not_shown_is_left_out_with_a_note(name: str, schema: dict[str, Any]) -> None:
    found = checked({name: schema, "kind": "plain", "notes": ["other"]})
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

"""The schemas of a function become components of an OpenAPI document, as Cog describes a model."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.functions.live import DesiredWorkers, FunctionStatus, Workers
from pilotflame.runtime.plugins.predictions.predictor_schema import predictor_components, predictor_document

COUNT = 1000


def status(wanted: dict[str, Any], output: dict[str, Any], *, streaming: bool = False) -> FunctionStatus:
    return FunctionStatus(
        name="f", revision="r1-abc", created_at=datetime(2026, 1, 2, tzinfo=UTC), kind="plain", streaming=streaming, batch=None,
        snapshot=None, workers=Workers(ready=0, parked=0, starting=0, draining=0), desired=DesiredWorkers(awake=0, held=0, because=[]),
        standby=False, rung=RungName.LOCAL, zygote=False, queued=0, in_flight=0, activations=0, last_cold_start_ms=None,
        last_cold_start_phases_ms={}, warnings=[], settings=FunctionSettings(name="f"), input_schema=wanted, output_schema=output,
    )  # fmt: skip


def test_each_of_many_definitions_is_referred_to() -> None:
    names = [f"D{number}" for number in range(COUNT)]
    schema = {
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in [*names, "Unknown"]},
        "$defs": {name: {"type": "object"} for name in names},
    }
    components = predictor_components(status(schema, {}), {"D7"})
    found = [one["$ref"].rpartition("/")[2] for one in components["Input"]["properties"].values()]
    assert found == [name if name != "D7" else "f.D7" for name in names] + ["Unknown"]
    assert components["Input"]["properties"]["Unknown"] == {"$ref": "#/$defs/Unknown"}
    assert {"D0", "f.D7"} <= components.keys()
    assert "D7" not in components


def test_inputs_are_described_as_cog_does() -> None:
    wanted = {
        "additionalProperties": False, "required": ["n"], "title": "Other",
        "properties": {
            "n": {"type": "integer"},
            "style": {"enum": ["a", "b"], "type": "string", "default": "a", "x-order": 1, "description": "Style."},
            "kind": {"enum": [1, 2]},
            "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None, "x-order": 2},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
    }  # fmt: skip
    found = predictor_components(status(wanted, {}), {"kind"})
    assert found["Input"] == {
        "type": "object", "title": "Input", "required": ["n"],
        "properties": {
            "n": {"type": "integer"},
            "style": {"allOf": [{"$ref": "#/components/schemas/style"}], "default": "a", "x-order": 1},
            "kind": {"allOf": [{"$ref": "#/components/schemas/f.kind"}]},
            "maybe": {"type": "integer", "default": None, "x-order": 2},
            "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        },
    }  # fmt: skip
    assert found["style"] == {"title": "style", "description": "Style.", "enum": ["a", "b"], "type": "string"}
    assert found["f.kind"] == {"title": "kind", "description": "An enumeration.", "enum": [1, 2]}


@pytest.mark.parametrize(
    ("schema", "streaming", "output", "more"),
    [
        ({"type": "string"}, False, {"type": "string", "title": "Output"}, {}),
        (
            {"type": "string", "x-cog-array-display": "concatenate"}, True,
            {"title": "Output", "type": "array", "items": {"type": "string"}, "x-cog-array-type": "iterator",
             "x-cog-array-display": "concatenate"}, {},
        ),
        (
            {"type": "object", "title": "Found", "properties": {}}, False,
            {"title": "Output", "$ref": "#/components/schemas/Found"},
            {"Found": {"type": "object", "title": "Found", "properties": {}}},
        ),
        ({"type": "object", "title": "Found"}, False, {"type": "object", "title": "Output"}, {}),
    ],
)  # fmt: skip
def test_outputs_are_described_as_cog_does(
    schema: dict[str, Any], streaming: bool, output: dict[str, Any], more: dict[str, Any]
) -> None:
    found = predictor_components(status({}, schema, streaming=streaming))
    assert found.pop("Input") == {"type": "object", "title": "Input", "properties": {}}
    assert found == {"Output": output, **more}


def test_the_document_has_the_components_of_cog_and_of_the_function() -> None:
    document = predictor_document(status({"properties": {"n": {"type": "integer"}}}, {}))
    assert document["openapi"].startswith("3.0")
    schemas = document["components"]["schemas"]
    assert schemas["Input"]["properties"] == {"n": {"type": "integer"}}
    assert {"PredictionRequest", "PredictionResponse"} <= schemas.keys()

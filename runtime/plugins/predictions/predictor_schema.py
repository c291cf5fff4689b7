"""Describes a function as Cog describes a model: by an OpenAPI document with the components `Input` and `Output`."""

from __future__ import annotations

import re
from collections.abc import Container
from pathlib import Path
from typing import Any

import orjson

from ...front.http.route_types import REFERENCE
from ...node.functions.status import FunctionStatus

DISPLAY = "x-cog-array-display"
_REFERENCE = re.compile(r'"#/\$defs/([^"\\]*)"')
# The paths that both Cog and this gateway have, and the components that these paths refer to.
_COG: dict[str, Any] = orjson.loads(Path(__file__).with_suffix(".json").read_bytes())


def predictor_document(function: FunctionStatus) -> dict[str, Any]:
    """Return the OpenAPI 3.0 document that Cog's server would return for this function."""
    schemas = _COG["components"]["schemas"]
    schemas = schemas | predictor_components(function, schemas)
    return _COG | {"components": {"schemas": schemas}}


def predictor_components(function: FunctionStatus, taken: Container[str] = ()) -> dict[str, Any]:
    """Return the components of the function's schemas: `Input`, `Output`, and the components that these two refer to.

    Any other component is renamed if its name is in `taken`, or is `Input` or `Output`.
    """
    components: dict[str, Any] = {}
    wanted = _moved(function.input_schema, function.name, taken, components)
    output = _moved(function.output_schema, function.name, taken, components)
    wanted.pop("additionalProperties", None)
    properties = {name: _without_null(one) for name, one in wanted.get("properties", {}).items()}
    for name, one in properties.items():
        if "enum" in one:
            label = _free(name, function.name, taken)
            components[label] = _enumeration(name, one)
            properties[name] = _reference_to(label, one)
    components["Input"] = {"type": "object"} | wanted | {"title": "Input", "properties": properties}
    components["Output"] = _output(output, function, taken, components)
    return components


def _output(
    schema: dict[str, Any], function: FunctionStatus, taken: Container[str], components: dict[str, Any]
) -> dict[str, Any]:
    display = {DISPLAY: schema.pop(DISPLAY)} if DISPLAY in schema else {}
    if function.streaming:
        return {"title": "Output", "type": "array", "items": schema, "x-cog-array-type": "iterator"} | display
    name = schema.get("title", "Output")
    if schema.get("type") == "object" and "properties" in schema and name != "Output":
        label = _free(name, function.name, taken)
        components[label] = schema
        return {"title": "Output", "$ref": REFERENCE + label}
    return schema | {"title": "Output"}


def _moved(
    schema: dict[str, Any], function: str, taken: Container[str], components: dict[str, Any]
) -> dict[str, Any]:
    """Return `schema` without its definitions, which are moved to `components`."""
    known = schema.get("$defs", {})

    def place(found: re.Match[str]) -> str:
        name = found[1]
        return f'"{REFERENCE}{_free(name, function, taken)}"' if name in known else found[0]

    # Replace all references in one pass, because the text may refer to each of a thousand definitions.
    moved: dict[str, Any] = orjson.loads(_REFERENCE.sub(place, orjson.dumps(schema).decode()))
    definitions = moved.pop("$defs", {})
    components.update({_free(name, function, taken): one for name, one in definitions.items()})
    return moved


def _free(name: str, function: str, taken: Container[str]) -> str:
    return f"{function}.{name}" if name in taken or name in ("Input", "Output") else name


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an input without the type null. As in Cog, callers omit an optional input instead."""
    choices = [one for one in schema.get("anyOf", ()) if one.get("type") != "null"]
    if len(choices) != 1:
        return schema
    only: dict[str, Any] = choices[0]
    return only | {key: value for key, value in schema.items() if key != "anyOf"}


def _enumeration(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    description = schema.get("description") or "An enumeration."
    found = {"title": name, "description": description, "enum": schema["enum"]}
    return found | {key: schema[key] for key in ("type",) if key in schema}


def _reference_to(label: str, schema: dict[str, Any]) -> dict[str, Any]:
    kept = {key: schema[key] for key in ("default", "x-order") if key in schema}
    return {"allOf": [{"$ref": REFERENCE + label}]} | kept

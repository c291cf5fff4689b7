"""Makes an example of a value from its JSON schema, for callers who see a function for the first time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 8
TEXT = "hello"
# A file that needs no network: `hello` as text.
URI = "data:text/plain;base64,aGVsbG8="
_BY_FORMAT = {
    "uri": URI, "date": "2026-01-31", "date-time": "2026-01-31T12:00:00Z", "time": "12:00:00", "duration": "PT1S",
    "email": "ada@example.com", "uuid": "123e4567-e89b-42d3-a456-426614174000",
}  # fmt: skip


def example_of(schema: Mapping[str, Any]) -> Any:
    """Return a small value that fits `schema`: the first example or default in `schema`, or a value with only the
    required fields.

    Patterns and custom validators are not considered. An empty schema has the example {}.
    """
    return _example(schema, schema.get("$defs", {}), 0) if schema else {}


def example_text(schema: Mapping[str, Any]) -> str:
    """Return `example_of` as JSON in one line."""
    return json.dumps(example_of(schema), ensure_ascii=False)


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    if depth > MAX_DEPTH:
        return None
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if "$ref" in schema:
        found = definitions.get(schema["$ref"].rpartition("/")[2], {})
        return _example(found, definitions, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if choices := schema.get(key):
            chosen = next((one for one in choices if one.get("type") != "null"), choices[0])
            return _example(chosen, definitions, depth + 1)
    return _of_type(schema, definitions, depth)


def _of_type(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            names = schema.get("required", ())
            return {name: _example(properties.get(name, {}), definitions, depth + 1) for name in names}
        case "array":
            count, first = schema.get("minItems", 1), schema.get("prefixItems")
            items = first or [schema.get("items") or {}] * max(1, count)
            return [_example(one, definitions, depth + 1) for one in items]
        case "string":
            text = _BY_FORMAT.get(schema.get("format", ""), TEXT)
            return text.ljust(schema.get("minLength", 0), "o")[: schema.get("maxLength")]
        case "integer" | "number" as kind:
            return _number(schema, 1) if kind == "integer" else float(_number(schema, 0.5))
    return {"boolean": True, "null": None}.get(schema.get("type", ""), TEXT)


def _number(schema: Mapping[str, Any], step: float) -> Any:
    """Return a number within the limits of `schema`: `step` itself if it fits, else a number at or near a limit."""
    step = schema.get("multipleOf", step)
    least = schema.get("minimum", schema.get("exclusiveMinimum", -math.inf))
    most = schema.get("maximum", schema.get("exclusiveMaximum", math.inf))
    if (
        least <= step <= most
        and step != schema.get("exclusiveMinimum")
        and step != schema.get("exclusiveMaximum")
    ):
        return step
    start = least if least > -math.inf else most
    if start in (schema.get("minimum"), schema.get("maximum")):
        return start
    between = (least + most) / 2
    return (
        start + step if start == least and start + step < most else start - step if start == most else between
    )

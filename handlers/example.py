"""Makes an example of a value from its JSON schema, for callers who see a function for the first time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import islice
from typing import Any

MAX_DEPTH = 8
MAX_VALUES = 256
"""The most values in an example. It limits the gateway's work for a schema, which the author of the function chooses."""
MAX_ITEMS = 8
MAX_TEXT_CHARS = 64
MAX_CHARS = 4096
"""The most characters of an example as JSON."""
_MAX_CHOICES = 16
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

    Patterns, custom validators, and lengths above MAX_ITEMS and MAX_TEXT_CHARS are not considered. The example is {}
    if the schema is empty or is no JSON schema, or if the example would be larger than the limits.
    """
    try:
        found = _Examples(schema.get("$defs", {})).of(schema, 0) if schema else {}
        return found if len(json.dumps(found, ensure_ascii=False)) <= MAX_CHARS else {}
    except (AttributeError, TypeError, ValueError, LookupError, OverflowError, RecursionError):
        return {}


class _Examples:
    """Makes the example of one schema, and counts its values."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._left = MAX_VALUES

    def of(self, schema: Mapping[str, Any], depth: int) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OverflowError(f"more than {MAX_VALUES} values")
        if depth > MAX_DEPTH:
            return None
        for key in ("examples", "enum"):
            if schema.get(key):
                return schema[key][0]
        for key in ("const", "default"):
            if key in schema:
                return schema[key]
        if "$ref" in schema:
            found = self._definitions.get(schema["$ref"].rpartition("/")[2], {})
            return self.of(found, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if choices := schema.get(key):
                some = islice(choices, _MAX_CHOICES)
                chosen = next((one for one in some if one.get("type") != "null"), choices[0])
                return self.of(chosen, depth + 1)
        return self._of_type(schema, depth)

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        match schema.get("type"):
            case "object":
                properties = schema.get("properties", {})
                names = schema.get("required", ())
                return {name: self.of(properties.get(name, {}), depth + 1) for name in names}
            case "array":
                count = min(MAX_ITEMS, max(1, schema.get("minItems", 1)))
                items = schema.get("prefixItems") or [schema.get("items") or {}] * count
                return [self.of(one, depth + 1) for one in items]
            case "string":
                text = _BY_FORMAT.get(schema.get("format", ""), TEXT)
                return text.ljust(min(MAX_TEXT_CHARS, schema.get("minLength", 0)), "o")[
                    : schema.get("maxLength")
                ]
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

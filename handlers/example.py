"""Makes an example of a value from its JSON schema, for callers who see a function for the first time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 8
MAX_CHARS = 16 << 10
MAX_ITEMS = 1000
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

    Patterns and custom validators are not considered. An empty schema has the example {}, and so has one that is none:
    a function may report anything. What exceeds MAX_CHARS is null.
    """
    try:
        return _Maker(schema.get("$defs", {})).make(schema, 0) if schema else {}
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return {}


def example_text(schema: Mapping[str, Any]) -> str:
    """Return `example_of` as JSON in one line."""
    return json.dumps(example_of(schema), ensure_ascii=False)


class _Maker:
    """Makes one example of at most MAX_CHARS."""

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions, self._left = definitions, MAX_CHARS

    def make(self, schema: Mapping[str, Any], depth: int) -> Any:
        if depth > MAX_DEPTH or self._left <= 0:
            return None
        for key in ("examples", "enum"):
            if schema.get(key):
                return self._copied(schema[key][0])
        for key in ("const", "default"):
            if key in schema:
                return self._copied(schema[key])
        if "$ref" in schema:
            found = self._definitions.get(schema["$ref"].rpartition("/")[2], {})
            return self.make(found, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if choices := schema.get(key):
                chosen = next((one for one in choices if one.get("type") != "null"), choices[0])
                return self.make(chosen, depth + 1)
        return self._of_type(schema, depth)

    def _copied(self, value: Any) -> Any:
        self._left -= len(json.dumps(value))
        return value if self._left > 0 else None

    def _of_type(self, schema: Mapping[str, Any], depth: int) -> Any:
        match schema.get("type"):
            case "object":
                properties, found = schema.get("properties", {}), {}
                for name in schema.get("required", ()):
                    self._left -= len(name)
                    found[name] = self.make(properties.get(name, {}), depth + 1)
                return found
            case "array":
                count, first = min(schema.get("minItems", 1), MAX_ITEMS), schema.get("prefixItems")
                items = first or [schema.get("items") or {}] * max(1, count)
                return [self.make(one, depth + 1) for one in items]
            case "string":
                text = _BY_FORMAT.get(schema.get("format", ""), TEXT)
                least = min(schema.get("minLength", 0), MAX_CHARS)
                return self._copied(text.ljust(least, "o")[: schema.get("maxLength")])
            case "integer" | "number" as kind:
                number = _number(schema, 1) if kind == "integer" else float(_number(schema, 0.5))
                return self._copied(number)
        return self._copied({"boolean": True, "null": None}.get(schema.get("type", ""), TEXT))


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

"""Makes the JSON schemas of the types in a route table, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import TypeAdapter

from ....handlers.codec import JSON_TYPE
from .routes import Route

REFERENCE = "#/components/schemas/"
Mode = Literal["validation", "serialization"]


class RouteTypes:
    """The schemas of all types in the route table. The schema of a class is a reference to a component."""

    def __init__(self, routes: Sequence[Route]) -> None:
        used: dict[tuple[str, Mode], Any] = {}
        for route in routes:
            used |= {(repr(kind), "validation"): kind for kind in _leaves(route.body)}
            for body in (route.response, *route.other_responses.values(), route.error_type):
                used |= {(repr(kind), "serialization"): kind for kind in _leaves(body)}
        inputs = [(name, mode, TypeAdapter(kind)) for (name, mode), kind in used.items()]
        self._schemas, definitions = TypeAdapter.json_schemas(inputs, ref_template=f"{REFERENCE}{{model}}")
        self.components: dict[str, Any] = definitions.get("$defs", {})

    def content(self, body: Any, mode: Mode) -> dict[str, Any]:
        by_media = body if isinstance(body, dict) and any("/" in key for key in body) else {JSON_TYPE: body}
        return {media: {"schema": self._schema(kind, mode)} for media, kind in by_media.items()}

    def _schema(self, kind: Any, mode: Mode) -> dict[str, Any]:
        if not isinstance(kind, dict):
            return self._schemas[repr(kind), mode]
        return {
            "type": "object",
            "required": [name for name in kind if not name.endswith("?")],
            "properties": {name.rstrip("?"): self._schema(one, mode) for name, one in kind.items()},
        }


def _leaves(body: Any) -> Iterator[Any]:
    """Yield the types inside a body of the route table, which may be a nested dict."""
    if isinstance(body, dict):
        for one in body.values():
            yield from _leaves(one)
    elif body is not None:
        yield body

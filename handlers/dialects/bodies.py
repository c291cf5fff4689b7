"""Bodies as other platforms have them: an input in its envelope or bare, answers that their JSON would take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ...errors import OutputInvalid
from ..codec import InputCodec, OutputCodec


class ShownInput(InputCodec):
    """Any JSON, with the schema of what is checked later: where the envelope is known, or in a thread."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        super().__init__(None)
        self._schema = dict(schema)

    def schema(self) -> dict[str, Any]:
        return self._schema


class ObjectInput(InputCodec):
    """Any JSON; no body is an empty object."""

    def __init__(self) -> None:
        super().__init__(None)

    def decode(self, body: bytes, content_type: str = "") -> Any:
        return super().decode(body, content_type) if body else {}


class LenientOutput(OutputCodec):
    """What `json.dumps` takes is taken, such as keys that are numbers; bytes stay bytes."""

    def __init__(self, schema: Mapping[str, Any] | None = None) -> None:
        super().__init__(None)
        self._schema = dict(schema or {})

    def schema(self) -> dict[str, Any]:
        return self._schema

    def encode(self, answer: Any, accept: str = "") -> tuple[bytes, str]:
        try:
            return super().encode(answer, accept)
        except OutputInvalid:
            try:
                plain = json.loads(json.dumps(answer, allow_nan=False))
            except (TypeError, ValueError, RecursionError):
                plain = answer  # then what is wrong with it is best said by the path of it
            return super().encode(plain, accept)


def is_envelope(event: Any, extra: Mapping[str, Any]) -> bool:
    """Whether the input is below "input" in `event`: not where whoever sent it says that it is bare."""
    return isinstance(event, dict) and "input" in event and not extra.get("bare")

"""Checks what a zygote reports of its handler. The function's own code runs in the zygote, so the report may be false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError

from ....errors import LauncherError
from ....foreign_json import failing_fast, first_errors
from ....handlers.contract import MAX_BATCH
from ....handlers.example import example_of

MAX_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 64 << 10
MAX_DEFINITIONS = 1000
MAX_NOTES = 16
SCHEMAS = ("input_schema", "output_schema")


class _Schema(BaseModel, extra="ignore", strict=True):
    """The parts of a JSON schema that the gateway reads, with the shapes that they must have."""

    title: str = ""
    ref: str = Field("", alias="$ref")
    properties: dict[str, _Schema] = Field(default_factory=dict)
    any_of: list[_Schema] = Field(default_factory=list, alias="anyOf")
    definitions: dict[str, _Schema] = Field(default_factory=dict, alias="$defs", max_length=MAX_DEFINITIONS)


_SCHEMA = failing_fast(TypeAdapter(_Schema))


def _readable(schema: dict[str, Any]) -> dict[str, Any]:
    _SCHEMA.validate_python(schema)
    return schema


_JsonSchema = Annotated[dict[str, Any], AfterValidator(_readable)]


class HandlerFacts(BaseModel, frozen=True, extra="ignore", strict=True):
    """The properties of a handler. See `Handler.facts`."""

    dialect: str = Field("", max_length=64)
    entry: str = Field("", max_length=4096)
    kind: str = Field("", max_length=64)
    streaming: bool = False
    aggregate: bool = True
    rehearses: bool = False
    batch: int | None = Field(None, ge=1, le=MAX_BATCH)
    input_schema: _JsonSchema = Field(default_factory=dict)
    output_schema: _JsonSchema = Field(default_factory=dict)
    import_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    build_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    notes: list[Annotated[str, Field(max_length=1000)]] = Field(default_factory=list, max_length=MAX_NOTES)
    """What the deployer should know (see `handlers/notes.py`)."""


_FACTS = failing_fast(TypeAdapter(HandlerFacts))


def checked(facts: Any, tell: Callable[[str], object] = len) -> dict[str, Any]:
    """Return the reported facts that are known, and an `input_example`. Raise LauncherError if they cannot be true.

    Leave out a schema that is too large to be shown. Add a note about this to the facts, and pass the note to `tell`.
    """
    try:
        found: dict[str, Any] = _FACTS.validate_python(facts).model_dump(exclude_unset=True)
        sizes = {name: len(orjson.dumps(found.get(name, {}))) for name in SCHEMAS}
    except ValidationError as error:
        wrong = first_errors(error, 1)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise LauncherError(f"A zygote reported {place[:200]}: {wrong['msg']}.") from None
    except (TypeError, ValueError):
        raise LauncherError("A zygote reported a schema that is nested too deeply.") from None
    large = {name: size for name, size in sizes.items() if size > MAX_SCHEMA_BYTES}
    if left_out := [_not_shown(name, size) for name, size in large.items()]:
        notes = [*found.get("notes", [])[: MAX_NOTES - len(left_out)], *left_out]
        found |= {name: {} for name in large} | {"notes": notes}
        for note in left_out:
            tell(note)
    if len(orjson.dumps(found)) > MAX_BYTES:
        raise LauncherError(f"A zygote reported more than {MAX_BYTES} bytes about its handler.")
    return found | {"input_example": example_of(found.get("input_schema", {}))}


def _not_shown(name: str, size: int) -> str:
    return f"{name} is not shown: it has {size} bytes, and may have {MAX_SCHEMA_BYTES}."

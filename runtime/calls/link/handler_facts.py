"""Checks what a zygote reports of its handler. The function's own code runs in the zygote, so the report may be false."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, ValidationError

from ....errors import LauncherError
from ....handlers.contract import MAX_BATCH

MAX_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 64 << 10
MAX_NOTES = 16
SCHEMAS = ("input_schema", "output_schema")


class HandlerFacts(BaseModel, frozen=True, extra="ignore", strict=True):
    """The properties of a handler. See `Handler.facts`."""

    dialect: str = Field("", max_length=64)
    entry: str = Field("", max_length=4096)
    kind: str = Field("", max_length=64)
    streaming: bool = False
    aggregate: bool = True
    rehearses: bool = False
    batch: int | None = Field(None, ge=1, le=MAX_BATCH)
    input_schema: dict[str, Any] = Field(default_factory=dict)
    output_schema: dict[str, Any] = Field(default_factory=dict)
    import_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    build_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    notes: list[Annotated[str, Field(max_length=1000)]] = Field(default_factory=list, max_length=MAX_NOTES)
    """What the deployer should know (see `handlers/notes.py`)."""


def checked(facts: Any, tell: Callable[[str], object] = len) -> dict[str, Any]:
    """Return the reported facts that are known. Raise LauncherError if they cannot be true.

    A schema that the gateway does not show is left out. A note says so, with which this calls `tell`, too.
    """
    try:
        found = HandlerFacts.model_validate(facts).model_dump(exclude_unset=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise LauncherError(
            f"A zygote reported {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}."
        ) from None
    reasons = {name: why for name in SCHEMAS if (why := _why_not_shown(found.get(name, {})))}
    if left_out := [f"{name} is not shown: it {why}." for name, why in reasons.items()]:
        notes = [*found.get("notes", [])[: MAX_NOTES - len(left_out)], *left_out]
        found |= {name: {} for name in reasons} | {"notes": notes}
        for note in left_out:
            tell(note)
    if len(orjson.dumps(found)) > MAX_BYTES:
        raise LauncherError(f"A zygote reported more than {MAX_BYTES} bytes about its handler.")
    return found


def _why_not_shown(schema: dict[str, Any]) -> str:
    """Return why the gateway does not keep a schema, which it sends with each list of functions; "" if it does."""
    if (size := len(orjson.dumps(schema))) > MAX_SCHEMA_BYTES:
        return f"has {size} bytes, and may have {MAX_SCHEMA_BYTES}"
    return "" if isinstance(schema.get("$defs", {}), dict) else "has definitions that are no object"

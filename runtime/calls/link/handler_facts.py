"""Checks what a zygote reports of its handler. The function's own code runs in the zygote, so the report may be false."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
from pydantic import BaseModel, Field, ValidationError

from ....errors import LauncherError
from ....handlers.contract import MAX_BATCH

MAX_BYTES = 1 << 20


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
    notes: list[Annotated[str, Field(max_length=1000)]] = Field(default_factory=list, max_length=16)
    """What the deployer should know (see `handlers/notes.py`)."""


def checked(facts: Any) -> dict[str, Any]:
    """Return the reported facts that are known. Raise LauncherError if they cannot be true."""
    try:
        found = HandlerFacts.model_validate(facts).model_dump(exclude_unset=True)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise LauncherError(
            f"A zygote reported {'.'.join(map(str, wrong['loc']))}: {wrong['msg']}."
        ) from None
    if len(orjson.dumps(found)) > MAX_BYTES:
        raise LauncherError(f"A zygote reported more than {MAX_BYTES} bytes about its handler.")
    return found

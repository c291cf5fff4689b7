"""Defines and validates the request log of a function, which is the table `[request_log]` of pilotflame.toml."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, Strict, model_validator

from .validation import checked, split_text

_STORE = re.compile(r"(s3|gs|az)://[^/\s@?#]+(/[^\s?#]*)?|/[^\0]*")
_ESCAPE = re.compile(r"~(?![01])")
ANY_PART = "*"
"""A part of a pointer that stands for every name and every index."""


def parts_of(pointer: str) -> tuple[str, ...]:
    """Return the parts of a JSON pointer (RFC 6901)."""
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:])


def _store_problem(store: str | None) -> str | None:
    if store is None or (_STORE.fullmatch(store) and ".." not in store.split("/")):
        return None
    return f"request_log.store is {store[:80]!r}; allowed: s3://, gs:// or az://bucket/prefix, or the absolute path of a folder"


def _pointer_problem(pointer: str) -> str | None:
    if parts_of(pointer)[:1] in (("input",), ("output",)) and not _ESCAPE.search(pointer):
        return None
    return f"{pointer[:80]!r} is no pointer into a call; write it as /input/age or /output/scores/*"


def _redacted_problem(field: str) -> str | None:
    return _pointer_problem(field) if field.startswith("/") else None


_Name = Annotated[str, Field(min_length=1, max_length=256)]
Pointer = Annotated[_Name, checked(_pointer_problem)]


class RequestLog(BaseModel, frozen=True, extra="forbid", strict=True):
    """Which calls are written to a store, and which of their numbers are in the metrics. By default, no calls."""

    store: Annotated[str | None, checked(_store_problem)] = Field(
        None,
        description="Where inputs and outputs are written: s3://, gs:// or az://bucket/prefix, or the absolute path of a folder;"
        " by default nowhere.",
    )
    format: Literal["jsonl", "parquet"] = Field(
        "jsonl",
        description="The format of the files: JSON lines, or Parquet, which needs the extra parquet.",
    )
    sample: float = Field(
        1.0, gt=0, le=1, description="The share of calls that the log and the statistics take."
    )
    redact: Annotated[
        tuple[Annotated[_Name, checked(_redacted_problem)], ...], Strict(False), BeforeValidator(split_text)
    ] = Field(
        (),
        max_length=100,
        description="Fields without their values: names, at any depth, as password; or JSON pointers, as /input/user/email,"
        " in which * stands for any name or index.",
    )
    statistics: Annotated[tuple[Pointer, ...], Strict(False), BeforeValidator(split_text)] = Field(
        (),
        max_length=32,
        description="JSON pointers of numbers, as /input/age or /output/scores/*, whose mean, quantiles and shift are in the metrics.",
    )

    @property
    def on(self) -> bool:
        return self.store is not None or bool(self.statistics)

    @property
    def packages(self) -> dict[str, str]:
        """The optional packages that it needs, by the setting that needs them."""
        wanted = {
            'request_log.format = "parquet"': (self.format == "parquet", "pyarrow"),
            "request_log.statistics": (bool(self.statistics), "fastdigest"),
        }
        return {setting: package for setting, (needed, package) in wanted.items() if needed}

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        used = {"sample": self.on, "redact": self.on, "format": self.store is not None}
        for key, is_used in used.items():
            if not is_used and getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f"request_log.{key} is set, but request_log.store is not; set request_log.store, or remove it"
                )
        return self

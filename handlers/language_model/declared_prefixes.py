"""The beginnings of prompts that a function declares in the table `[prefixes]`, and where their keys and values are kept.

`build` turns them into tokens, which needs no weights. Each worker maps their keys and values before its first call.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from ...errors import SettingsError
from ...snapshot.computed import ComputedSnapshots
from .contract import Tool

MOST_TOOL_BYTES = 4 << 20


class PromptBeginning(BaseModel):
    """The messages with which prompts begin, and the tools that their requests have."""

    model_config = ConfigDict(extra="forbid")

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)


BEGINNINGS: TypeAdapter[dict[str, PromptBeginning]] = TypeAdapter(
    # Limit the characters of the names, because the names of tensors begin with them.
    dict[Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")], PromptBeginning]
)


@dataclass
class DeclaredPrefixes:
    """What a handler gets as `context.prefixes`, and gives to `language_model`."""

    declared: Mapping[str, Mapping[str, Any]]
    """The messages, tools and variables of the chat template of each beginning. `tools` may be the name of a file."""
    code: Path
    """The folder of the function, which has the files that `tools` names."""
    kept: ComputedSnapshots
    prepare: Callable[[], None] | None = None
    """Maps the keys and values, or computes them. `language_model` sets it. A worker calls it once, after it has opened the weights."""

    def beginnings(self) -> dict[str, dict[str, Any]]:
        """Return the fields of each beginning, checked. Raise SettingsError, which names the field."""
        given = {name: self._with_tools(name, fields) for name, fields in self.declared.items()}
        try:
            found = BEGINNINGS.validate_python(given)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, ("prefixes", *first["loc"])))
            raise SettingsError(f"{place}: {first['msg']}.", remedy="Correct pilotflame.toml.") from None
        return {name: one.model_dump(exclude_none=True) for name, one in found.items()}

    def _with_tools(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of a beginning, with the tools of the file that `tools` names. `build` calls this, so that the file is
        read with the rights of the function.
        """
        if not isinstance(file := fields.get("tools"), str):
            return dict(fields)
        try:
            with (self.code / file).open("rb") as stream:
                text = stream.read(MOST_TOOL_BYTES + 1)
            if len(text) > MOST_TOOL_BYTES:
                raise _unreadable(name, file, f"it has more than {MOST_TOOL_BYTES >> 20} MiB")
            return {**fields, "tools": json.loads(text)}
        except OSError as error:
            raise _unreadable(name, file, str(error.strerror)) from error
        except (ValueError, RecursionError) as error:
            raise _unreadable(name, file, f"it is no JSON ({error})") from error


def _unreadable(name: str, file: str, why: str) -> SettingsError:
    message = f"prefixes.{name}.tools: {file!r} cannot be read: {why}."
    return SettingsError(message, remedy="Name a JSON file of the function's folder.")

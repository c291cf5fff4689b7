"""Describes every setting of functions and of the gateway, for `pilotflame settings` and docs/settings.md.

The descriptions are made from the models that validate the settings, so both always agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from ....errors import SettingsError
from ....handlers.recognise import installed_dialects
from .function_settings import SETTINGS_FILE, FunctionSettings
from .gateway_settings import GatewaySettings
from .validation import ENV_PREFIX, LISTED, keys, unknown_key

_MIB = 1 << 20
_TYPES = {"integer": "whole number", "boolean": "true or false", "object": "table of texts", "string": "text"}
_PAGE = """# Settings

This page is generated: `pilotflame settings --markdown > docs/settings.md`. `pilotflame settings NAME` shows one setting, and
`pilotflame status FUNCTION --all` shows those in force for a function and where each comes from.

## Functions

A function's settings are in `{file}` in its folder. `pilotflame deploy --set KEY=VALUE` overrides one of them. Keys with a dot
are in a table: `scale.max` is `max` under `[scale]`. The keys `source.…` are in each `[[source]]` table, and `schedule.…`
in each `[[schedule]]`. An unknown key is refused. Instead of `handler`, a key of a platform may name it: {short}.

{functions}

`env` may set `PILOTFLAME_INPUT_NETWORKS`: private networks from which a handler's input files may be fetched.

## Gateway

The gateway reads each setting from an option of `pilotflame serve`, else from the environment variable, else from the file that
`--config FILE` or `PILOTFLAME_CONFIG` names, else it takes the default. The file is TOML with the keys below, such as
`port = 8600`; a relative path in it is relative to the file's folder. An unknown key or variable is refused.

{gateway}

The commands also read `PILOTFLAME_URL` (the gateway's address; by default this machine, with `PILOTFLAME_PORT`) and `PILOTFLAME_API_KEY`.
"""


class SettingFacts(NamedTuple):
    """The facts about one setting, for its readers. `variable` is "" for a function's setting."""

    name: str
    scope: Literal["function", "gateway"]
    variable: str
    type: str
    range: str
    default: str
    meaning: str


def all_settings() -> list[SettingFacts]:
    """Return the settings of functions, then the settings of the gateway, in the order of their models."""
    functions = [_facts(name, field, "function") for name, field in keys(FunctionSettings).items()]
    return [*functions, *(_facts(name, field, "gateway") for name, field in keys(GatewaySettings).items())]


def find_settings(name: str) -> list[SettingFacts]:
    """Return the settings with this key or variable, or the settings of the table with this name.

    Raise SettingsError, which names the most similar key, if there are no such settings.
    """
    found = all_settings()
    named = [one for one in found if name in (one.name, one.variable)]
    if named := named or [one for one in found if one.name.startswith(f"{name}.")]:
        return named
    tables = [one.name.partition(".")[0] for one in found]
    known = [text for one in found for text in (one.name, one.variable) if text] + tables
    told = unknown_key(name, dict.fromkeys(known)).partition(LISTED)[0]
    raise SettingsError(told, remedy="List them: pilotflame settings.")


def markdown() -> str:
    """Return the content of docs/settings.md."""
    found = all_settings()
    functions = _table(("key", "type", "range", "default", "meaning"), _rows(found, "function"))
    gateway = _table(("key", "variable", "type", "range", "default", "meaning"), _rows(found, "gateway"))
    short = ", ".join(f'`{key} = "module:name"`' for key in sorted(installed_dialects().short_keys))
    return _PAGE.format(file=SETTINGS_FILE, functions=functions, gateway=gateway, short=short)


def _rows(found: Iterable[SettingFacts], scope: str) -> Iterator[tuple[str, ...]]:
    for one in found:
        if one.scope == scope:
            variable = (f"`{one.variable}`",) if one.variable else ()
            default = f"`{one.default}`" if one.default else ""
            yield (f"`{one.name}`", *variable, one.type, one.range, default, one.meaning)


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', ' or ') for cell in line)} |" for line in lines)


def _facts(name: str, field: FieldInfo, scope: Literal["function", "gateway"]) -> SettingFacts:
    schema = _schema(field)
    variable = ENV_PREFIX + name.upper() if scope == "gateway" else ""
    return SettingFacts(
        name,
        scope,
        variable,
        _type_of(schema),
        _range_of(schema),
        _default_of(field),
        field.description or "",
    )


def _schema(field: FieldInfo) -> dict[str, Any]:
    """Return the JSON Schema of a field's values, without null."""
    annotated: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    schema: dict[str, Any] = TypeAdapter(annotated).json_schema()
    parts = [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]
    return {**schema, **parts[0]}


def _type_of(schema: dict[str, Any]) -> str:
    if "enum" in schema or "const" in schema:
        return " or ".join(f'"{one}"' for one in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return "list of tables" if {"$ref", "oneOf"} & schema["items"].keys() else "list of texts"
    if schema.get("format") == "path":
        return "path"
    if schema.get("additionalProperties") is True:
        return "table of tables"
    return _TYPES.get(schema["type"], str(schema["type"]))


def _range_of(schema: dict[str, Any]) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most = schema.get("maximum", schema.get("maxItems"))
    low = f"{least:g}" if least is not None else f"above {above:g}" if above is not None else ""
    if most is None:
        return f"{low} or more" if least is not None else low
    return f"{low} to {most}" if low else f"at most {most}"


def _default_of(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "shown_default" in extra:
        return str(extra["shown_default"])
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, int) and value >= _MIB and value % _MIB == 0:
        return f"{value} ({value // _MIB} MiB)"
    return json.dumps(value)

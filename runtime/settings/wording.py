"""The wording of settings: what a model's keys are called, what each allows, and what is wrong with a value.

Generic over frozen pydantic models with nested sections; keys are dotted (`scale.max`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ...errors import SettingsError

ENV_PREFIX = "PILOTFLAME_"
"""The beginning of the names of environment variables that are settings."""
YEAR_S = 365 * 24 * 3600
"""The longest time that a setting may name."""
_ModelT = TypeVar("_ModelT", bound=BaseModel)
_TYPES = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    dict: "table of text",
}


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key that holds a value, dotted, in the order of the model."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        if section := _section(field):
            found |= leaves(section, f"{prefix}{name}.")
        else:
            found[prefix + name] = field
    return found


def entries(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of what a model holds as lists of tables, dotted without numbers: `source.queue`."""
    return {
        f"{name}.{key}": field
        for name, listing in model.model_fields.items()
        if (entry := table(listing))
        for key, field in leaves(entry).items()
    }


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: `whole number, 1 to 1024`."""
    if table(field):
        return "tables"
    kind = _kind(field.annotation)
    if isinstance(kind, str):
        return kind
    bounds = _bounds(field)
    words = _TYPES.get(kind, "path") if kind else "value"
    return f"{words}, {bounds}" if bounds else words


def default_text(field: FieldInfo) -> str:
    """The default as one would write it in TOML; empty where there is none."""
    default = field.get_default()
    if field.is_required() or default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f'"{default}"' if isinstance(default, str) else str(default)


def unknown(key: str, known: Iterable[str]) -> str:
    """That `key` is not a setting, and which one was probably meant."""
    names = list(known)
    last = key.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last]
    near += difflib.get_close_matches(key, names, n=1) or difflib.get_close_matches(
        last, [name.rpartition(".")[2] for name in names], n=1
    )
    if near:
        full = next(name for name in names if near[0] in (name, name.rpartition(".")[2]))
        return f"{key} is not a setting; did you mean {full}?"
    return f"{key} is not a setting; there are {', '.join(names)}."


def describe(model: type[BaseModel], error: ValidationError) -> list[str]:
    """Each of pydantic's findings as one sentence about one key."""
    known = leaves(model) | entries(model)
    return [_problem(details, known) for details in error.errors(include_url=False)]


def sentence(text: str) -> str:
    """The text with an end."""
    return text if text.endswith(("?", ".")) else f"{text}."


def _problem(details: ErrorDetails, known: dict[str, FieldInfo]) -> str:
    loc = [part for part in details["loc"] if part != "[key]"]
    key = ".".join(str(part) for part in loc)
    plain = ".".join(
        part for part in loc if isinstance(part, str)
    )  # in a list of tables all have the same keys
    if details["type"] == "extra_forbidden":
        return unknown(plain, known)
    if details["type"] == "missing":
        return f"{key} is missing; allowed: {allowed(known[plain])}"
    if details["type"] == "value_error":  # our own validators name their key themselves
        return str(details["ctx"]["error"])
    if plain in known:
        return f"{key} is {_shown(details['input'])}; allowed: {allowed(known[plain])}"
    section = key.partition(".")[0]
    if section in known:  # an entry of a table: it may be a secret, so its value is not shown
        return f"{key} is of type {type(details['input']).__name__}; allowed: text"
    return f"{key} is {_shown(details['input'])}; allowed: a table, [{key}]"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def table(field: FieldInfo) -> type[BaseModel] | None:
    """What a list of tables holds."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) is tuple else ()
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _kind(annotation: Any) -> type | str | None:
    """The one type of an annotation, or for a choice its words."""
    if get_origin(annotation) is Literal:
        return " or ".join(f'"{choice}"' for choice in get_args(annotation))
    if get_origin(annotation) is dict:
        return dict
    options = [option for option in get_args(annotation) if option is not NoneType]
    kind = options[0] if options else annotation
    return kind if isinstance(kind, type) else None


def _bounds(field: FieldInfo) -> str:
    found: dict[type, Any] = {type(item): item for item in field.metadata}
    low, above = found.get(annotated_types.Ge), found.get(annotated_types.Gt)
    high = found.get(annotated_types.Le)
    if low and high:
        return f"{low.ge} to {high.le}"
    if above and high:
        return f"above {above.gt}, at most {high.le}"
    return f"at least {low.ge}" if low else ""


def validate(
    model: type[_ModelT], raw: dict[str, Any], problems: list[str], what: str, remedy: str
) -> _ModelT:
    """The model of `raw`, or one error that tells every problem."""
    try:
        settings = model.model_validate(raw)
    except ValidationError as error:
        problems = problems + describe(model, error)
    else:
        if not problems:
            return settings
    text = " ".join(sentence(problem) for problem in dict.fromkeys(problems))
    raise SettingsError(f"{what} cannot be taken: {text}", remedy=remedy, details={"problems": problems})

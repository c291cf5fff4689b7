"""Validation of settings: each problem names its key, and for a misspelt key the nearest valid one.

Works for frozen pydantic models with nested tables and lists of tables. Keys are dotted: `scale.max`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ...errors import SettingsError

ENV_PREFIX = "PILOTFLAME_"
"""How the names of environment variables that are settings begin."""
YEAR_S = 365 * 24 * 3600
"""The longest time that a setting may hold."""
Seconds = Annotated[float, Field(ge=0, le=YEAR_S, allow_inf_nan=False)]
PositiveSeconds = Annotated[float, Field(gt=0, le=YEAR_S, allow_inf_nan=False)]

_ModelT = TypeVar("_ModelT", bound=BaseModel)
# Where pydantic's message names a type of Python instead of one of TOML.
_EXPECTED = {"dict_type": "a table", "model_type": "a table", "tuple_type": "a list of tables"}


def checked(problem_of: Callable[[Any], str | None]) -> AfterValidator:
    """Return a validator that raises the value's problem, if there is one."""

    def check(value: Any) -> Any:
        if problem := problem_of(value):
            raise ValueError(problem)
        return value

    return AfterValidator(check)


def validate(
    model: type[_ModelT], raw: dict[str, Any], problems: list[str], subject: str, remedy: str
) -> _ModelT:
    """Return the model of `raw`. Raise one SettingsError for `problems` and all that is wrong with `raw`."""
    try:
        settings = model.model_validate(raw)
    except ValidationError as error:
        known = keys(model)
        problems = problems + [_problem(details, known) for details in error.errors(include_url=False)]
    else:
        if not problems:
            return settings
    sentences = (text if text.endswith(("?", ".")) else f"{text}." for text in dict.fromkeys(problems))
    message = f"{subject} are invalid: {' '.join(sentences)}"
    raise SettingsError(message, remedy=remedy, details={"problems": problems})


def keys(model: type[BaseModel], prefix: str = "", *, lists: bool = True) -> dict[str, FieldInfo]:
    """Return every dotted key that holds a value, and with `lists` those of tables in lists: `source.queue`."""
    found: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        table, is_list = _table(field), get_origin(field.annotation) is tuple
        if table is None or is_list:
            found[prefix + name] = field
        if table is not None and (lists or not is_list):
            found |= keys(table, f"{prefix}{name}.", lists=lists)
    return found


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the problem that `key` is not a setting, with the nearest of the known ones."""
    names = list(known)
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    last = key.rpartition(".")[2]
    near = [by_last[last]] if last in by_last else difflib.get_close_matches(key, names, n=1)
    near = near or [by_last[match] for match in difflib.get_close_matches(last, by_last, n=1)]
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}."
    return f"{key} is not a setting; {hint}"


def _problem(details: ErrorDetails, known: dict[str, FieldInfo]) -> str:
    """Return one of pydantic's findings as a sentence about one key."""
    loc = [part for part in details["loc"] if part != "[key]"]
    key = ".".join(map(str, loc))
    # All tables of a list have the same keys.
    plain = ".".join(part for part in loc if isinstance(part, str))
    kind, value = details["type"], repr(details["input"])
    if kind == "extra_forbidden":
        return unknown_key(plain, known)
    if kind == "missing":
        return f"{key} is missing"
    if kind == "value_error":
        # Our own validators name the key themselves.
        return str(details["ctx"]["error"])
    if plain not in known and key.partition(".")[0] in known:
        # An environment variable's value may be a secret.
        return f"{key} is of type {type(details['input']).__name__}; it should be text"
    expected = f"should be {_EXPECTED[kind]}" if kind in _EXPECTED else details["msg"].removeprefix("Input ")
    return f"{key} is {value if len(value) <= 80 else f'{value[:77]}...'}; it {expected}"


def _table(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a nested table, or of the tables in a list."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)

"""Provides a stand-in for the `cog` package: the names that a predict.py imports from it."""

from __future__ import annotations

import io
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pydantic
from pydantic_core import CoreSchema, core_schema

from .stand_in import stand_in_modules

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY_MARK = "__cog_concurrent_max__"


def stand_in() -> dict[str, ModuleType]:
    return stand_in_modules({"cog": _NAMES, "cog.types": _NAMES})


class BaseRunner:
    """The base class of predictors."""

    def setup(self, weights: Any = None) -> None:
        """Load the model. Does nothing unless a predictor overrides it."""

    @property
    def scope(self) -> CogScope:
        return current_scope()

    def record_metric(self, key: str, value: Any, mode: str = "replace") -> None:
        self.scope.record_metric(key, value, mode)


class BasePredictor(BaseRunner):
    """The older name of BaseRunner."""


@dataclass(frozen=True)
class FieldInfo:
    """The options of an `Input(...)`."""

    default: Any = None
    description: str | None = None
    ge: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    regex: str | None = None
    choices: list[str | int] | None = None
    deprecated: bool | None = None
    accept: str | None = None


def Input(default: Any = ..., **options: Any) -> Any:  # noqa: N802  Cog's name
    """Return the default value of a parameter of `predict` that also describes the parameter."""
    return FieldInfo(default, **options)


class Path(type(pathlib.Path())):  # type: ignore[misc]
    """A file. As an input it is downloaded from the caller's URL, as an output it is sent as a data URL."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        return {"type": "string", "format": "uri"}


class File(io.IOBase):
    """An input file that is already open for reading."""


@dataclass(frozen=True)
class Secret:
    """Text that is not printed."""

    secret_value: str | None = None

    def __repr__(self) -> str:
        return f"Secret({self})"

    def __str__(self) -> str:
        return "**********" if self.secret_value is not None else ""

    def get_secret_value(self) -> str | None:
        return self.secret_value


class BaseModel(pydantic.BaseModel):
    """An output of several fields."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


class ConcatenateIterator(Iterator[T]):
    """A stream of pieces of one text."""


class AsyncConcatenateIterator(AsyncIterator[T]):
    """An async stream of pieces of one text."""


class CogScope:
    """Replaces Cog's `Scope`, which records a prediction's metrics. Pilotflame does not use them."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.context: dict[str, str] = {}

    def record_metric(self, key: str, value: Any, mode: str = "replace") -> None:
        self.metrics[key] = value


def current_scope() -> CogScope:
    return CogScope()


def emit_metric(name: str, value: Any) -> None:
    """Do nothing. In Cog this is an older name of `current_scope().record_metric`."""


def streaming(call: F | None = None) -> Any:
    """Decorate a function without a change: its return annotation already says that it streams."""
    return call if call is not None else lambda inner: inner


def concurrent(call: F | None = None, *, max: int = 1) -> Any:  # noqa: A002  Cog's name
    """Decorate an async `predict`: one worker runs up to `max` predictions at the same time."""

    def mark(inner: F) -> F:
        setattr(inner, CONCURRENCY_MARK, max)
        return inner

    return mark(call) if call is not None else mark


class CancelationException(BaseException):
    """The exception that Cog raises in cancelled predictions. Pilotflame never raises it."""


class ExperimentalFeatureWarning(FutureWarning):
    """A warning category of Cog."""


_NAMES: dict[str, Any] = {
    **{one.__name__: one for one in (
        AsyncConcatenateIterator, BaseModel, BasePredictor, BaseRunner, CancelationException, ConcatenateIterator,
        ExperimentalFeatureWarning, FieldInfo, File, Input, Path, Secret, concurrent, current_scope, emit_metric,
        streaming,
    )},
    "Scope": CogScope,
    "URLPath": Path,
    "URLFile": File,
}  # fmt: skip

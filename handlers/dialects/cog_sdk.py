"""A stand-in for the `cog` package, where it is not installed: the names that a predict.py imports."""

from __future__ import annotations

import io
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pydantic
from pydantic_core import CoreSchema, core_schema

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY_MARK = "__cog_concurrent_max__"


def stand_in() -> dict[str, ModuleType]:
    """The modules, by name."""
    cog, types = (
        ModuleType("cog", "Pilotflame's stand-in."),
        ModuleType("cog.types", "Pilotflame's stand-in."),
    )
    for module in (cog, types):
        vars(module).update(_NAMES)

    def missing(attribute: str) -> Any:
        raise AttributeError(
            f"pilotflame's stand-in for cog has no {attribute!r}: add cog to requirements.txt"
        )

    cog.__path__ = []  # a package, so that `import cog.types` looks no further
    vars(cog).update(types=types, __getattr__=missing)
    return {"cog": cog, "cog.types": types}


class BaseRunner:
    """What a predictor derives from."""

    def setup(self, weights: Any = None) -> None:
        """Overridden by those who have something to load."""

    @property
    def scope(self) -> Scope:
        return current_scope()

    def record_metric(self, key: str, value: Any, mode: str = "replace") -> None:
        self.scope.record_metric(key, value, mode)


class BasePredictor(BaseRunner):
    """The older name."""


@dataclass(frozen=True)
class FieldInfo:
    """What `Input(...)` says of a parameter."""

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


NO_DEFAULT: Any = ...


def Input(default: Any = NO_DEFAULT, **said: Any) -> Any:  # noqa: N802  Cog's name
    """Describes a parameter of `predict`."""
    return FieldInfo(default, **said)


class Path(type(pathlib.Path())):  # type: ignore[misc]
    """A file: in inputs fetched from the address that the caller sent, in answers sent as a data URL."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        return {"type": "string", "format": "uri"}


class File(io.IOBase):
    """An input that is opened."""


@dataclass(frozen=True)
class Secret:
    """Text that does not show itself."""

    secret_value: str | None = None

    def __repr__(self) -> str:
        return f"Secret({self})"

    def __str__(self) -> str:
        return "**********" if self.secret_value is not None else ""

    def get_secret_value(self) -> str | None:
        return self.secret_value


class BaseModel(pydantic.BaseModel):
    """An answer of several fields."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


class ConcatenateIterator(Iterator[T]):
    """Pieces of one text."""


class AsyncConcatenateIterator(AsyncIterator[T]):
    """The same, async."""


class Scope:
    """Where a prediction's metrics would go; here they go nowhere."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.context: dict[str, str] = {}

    def record_metric(self, key: str, value: Any, mode: str = "replace") -> None:
        self.metrics[key] = value


def current_scope() -> Scope:
    """A scope that nobody reads."""
    return Scope()


def emit_metric(name: str, value: Any) -> None:
    """The older spelling of `current_scope().record_metric`."""


def streaming(call: F | None = None) -> Any:
    """Says what the annotation says already."""
    return call if call is not None else lambda inner: inner


def concurrent(call: F | None = None, *, max: int = 1) -> Any:  # noqa: A002  Cog's name
    """How many async predictions one worker runs at the same time."""

    def mark(inner: F) -> F:
        setattr(inner, CONCURRENCY_MARK, max)
        return inner

    return mark(call) if call is not None else mark


class CancelationException(BaseException):  # its name is Cog's
    """What a cancelled prediction is told at Cog; here an async one is cancelled, a plain one asks nobody."""


class ExperimentalFeatureWarning(FutureWarning):
    """Cog's."""


_NAMES: dict[str, Any] = {
    **{one.__name__: one for one in (
        AsyncConcatenateIterator, BaseModel, BasePredictor, BaseRunner, CancelationException, ConcatenateIterator,
        ExperimentalFeatureWarning, FieldInfo, File, Input, Path, Secret, concurrent, current_scope, emit_metric,
        streaming,
    )},
    "URLPath": Path,
    "URLFile": File,
}  # fmt: skip

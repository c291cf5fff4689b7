"""Provides a stand-in for the `cog` package: the names that a predict.py imports from it.

With the real package, workers would start as fast as with the stand-in, because a zygote imports it in advance. But no
cog.yaml lists the package, and `--install` of it would make an environment with its own base. This means a slower first
deploy, more disk and more memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import pydantic
from pydantic_core import CoreSchema, core_schema

from ....handlers.stand_in import stand_in_modules
from ..predictions.cog_version import COG_VERSION

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY_MARK = "__cog_concurrent_max__"
_URI = {"type": "string", "format": "uri"}


def stand_in() -> dict[str, ModuleType]:
    modules = ("cog", "cog.types", "cog.base_predictor", "cog.predictor", "cog.server", "cog.server.scope")
    return stand_in_modules(dict.fromkeys(modules, _NAMES))


class BaseRunner:
    """The base class of predictors."""

    def setup(self, weights: Any = None) -> None:
        """Load the model. A predictor overrides this method, which does nothing."""

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
    """Return a default value for a parameter of `predict`. The value also describes the parameter."""
    return FieldInfo(default, **options)


def declared_input(default: Any) -> FieldInfo | None:
    """Return the options of a parameter whose default is an `Input(...)` of any version of Cog. Otherwise return None.

    In the result, the default `...` means that the caller must send a value.
    """
    if isinstance(default, FieldInfo):
        return default
    if isinstance(default, pydantic.fields.FieldInfo):
        return _of_pydantic(default)
    # In Cog 0.17 and later, `Input(...)` returns an object of Cog's own class.
    if not (hasattr(default, "choices") and hasattr(default, "regex")):
        return None
    options = {field.name: getattr(default, field.name, None) for field in dataclasses.fields(FieldInfo)}
    # In that class, `default` is None both for `Input()` and for `Input(None)`. Take it for an input without a default.
    return FieldInfo(**options | {"default": ... if default.default is None else default.default})


def _of_pydantic(info: pydantic.fields.FieldInfo) -> FieldInfo:
    """Return the options of an `Input(...)` of Cog 0.9 to 0.16, which is a field of pydantic."""
    limits = {
        name: value
        for constraint in info.metadata
        for name in ("ge", "le", "min_length", "max_length", "pattern")
        if (value := getattr(constraint, name, None)) is not None
    }
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    choices: Any = extra.get("enum") or extra.get("choices")
    return FieldInfo(
        ... if info.is_required() else info.get_default(call_default_factory=True),
        regex=limits.pop("pattern", None), choices=list(choices) if choices else None,
        description=info.description, deprecated=bool(info.deprecated) or None, **limits,
    )  # fmt: skip


class Path(type(pathlib.Path())):  # type: ignore[misc]
    """The path of a file. An input is downloaded from the caller's URL. An output is uploaded or sent as a data URL."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls)

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        return dict(_URI)


class File(io.IOBase):
    """A file that is open for reading. As an output, a predictor may return any open file instead."""

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> CoreSchema:
        return core_schema.is_instance_schema(io.IOBase)

    @classmethod
    def __get_pydantic_json_schema__(cls, *_: Any) -> dict[str, Any]:
        return dict(_URI)


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


class MetricRecorder:
    """The metrics of a scope, which can only be written."""

    def __init__(self, record: Callable[[str, Any, str], None]) -> None:
        self._record = record

    def record(self, key: str, value: Any, mode: str = "replace") -> None:
        self._record(key, value, mode)

    def delete(self, key: str) -> None:
        self._record(key, None, "replace")

    __setitem__ = record
    __delitem__ = delete


class CogScope:
    """Replaces Cog's `Scope`: the context of the prediction that runs, and its metrics."""

    def __init__(self, record_metric: Any = None, context: Mapping[str, str] | None = None) -> None:
        """`record_metric(name, value, mode)` records a metric. Outside of predictions, it is None."""
        self.metrics = MetricRecorder(record_metric or (lambda *_: None))
        self.context = dict(context or {})

    def record_metric(self, key: str, value: Any, mode: str = "replace") -> None:
        self.metrics.record(key, value, mode)


_scope: ContextVar[CogScope | None] = ContextVar("scope", default=None)


@contextlib.contextmanager
def scope(entered: CogScope) -> Iterator[None]:
    """Make `current_scope` return `entered` until the block ends. Cog has the same function in `cog.server.scope`."""
    token = _scope.set(entered)
    try:
        yield
    finally:
        _scope.reset(token)


def current_scope() -> CogScope:
    return _scope.get() or CogScope()


def emit_metric(name: str, value: Any) -> None:
    """Record a metric. This is the older name of `current_scope().record_metric`."""
    current_scope().record_metric(name, value)


def streaming(call: F | None = None) -> Any:
    """Return the decorated function unchanged, because its return annotation already says that it streams."""
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
        scope, streaming,
    )},
    "__version__": COG_VERSION,
    "Scope": CogScope,
    "URLPath": Path,
    "URLFile": File,
}  # fmt: skip

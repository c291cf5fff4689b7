"""Cog's typed inputs: a model made of `predict`'s signature, with what each `Input(...)` says."""

from __future__ import annotations

import inspect
import io
import re
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)
from pydantic.errors import PydanticSchemaGenerationError

from ...errors import HandlerSignatureError
from ..codec import input_error
from ..handler import written
from .cog_sdk import FieldInfo
from .files import Fetched

_BOUNDS = ("ge", "le", "min_length", "max_length")
_URI = {"type": "string", "format": "uri"}
_PREFIX = "input_"  # of the model's own names: a parameter may be called `schema` or `_x`
_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())


class CogInputs:
    """The inputs of one `predict`."""

    def __init__(self, predict: Callable[..., Any], what: str) -> None:
        """`predict` without its `self`; `what` is what it is called in messages."""
        self.names: tuple[str, ...] = ()
        self._files = False
        try:
            hints = typing.get_type_hints(written(predict), include_extras=True)
            fields = {}
            for name, parameter in inspect.signature(predict).parameters.items():
                if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                    continue
                self.names += (name,)
                fields[_PREFIX + name] = self._field(name, parameter.default, hints.get(name, Any))
            self._model = create_model("Input", __config__=_CONFIG, **fields)
            self._fields = dict(zip(self.names, fields, strict=True))
            self.schema: Mapping[str, Any] = self._model.model_json_schema()
            self.returned = hints.get("return")
            self.output = _schema_of(self.returned)
        except (NameError, SyntaxError, TypeError, PydanticUserError, PydanticSchemaGenerationError) as error:
            raise HandlerSignatureError(
                f"The inputs of {what} cannot be used: {error}",
                remedy="Annotate with types that Cog knows: str, int, float, bool, cog.Path, list[…], Optional[…].",
            ) from None

    @property
    def with_files(self) -> bool:
        """Whether checking them may fetch something."""
        return self._files

    def unwrapped(self, event: Any, extra: Mapping[str, Any]) -> Any:
        """The inputs of `{"input": {…}}`, or of a bare body; of a model that has an `input` itself, as it fits."""
        if not isinstance(event, dict) or set(event) & set(self.names) - {"input"} or extra.get("bare"):
            return {} if event is None else event
        inner = event.get("input")
        if "input" in event and ("input" not in self.names or (isinstance(inner, dict) and "input" in inner)):
            return {} if inner is None else inner
        return event

    def check(self, given: Any, files: Fetched) -> dict[str, Any]:
        """The arguments of `predict`, files fetched. Raises InputInvalid naming the fields that do not fit. Blocking."""
        try:
            model = self._model.model_validate(given, context=files)
        except ValidationError as error:
            raise input_error(error) from None
        return {name: getattr(model, own) for name, own in self._fields.items()}

    def _field(self, name: str, said: Any, annotation: Any) -> Any:
        described = hasattr(said, "choices") and hasattr(said, "regex")  # Input(...), the real one's too
        kept: dict[str, Any] = {"alias": name, "title": name.replace("_", " ").capitalize()}
        if described:
            kept |= {key: value for key in _BOUNDS if (value := getattr(said, key)) is not None}
            kept["description"] = said.description
            kept["deprecated"] = getattr(said, "deprecated", None)
        seen, self._files = self._files, False
        kind = self._type(_chosen(annotation, said.choices) if described and said.choices else annotation)
        fetches, self._files = self._files, self._files or seen
        if described and said.regex:
            kind = _constrained(kind, lambda inner: Annotated[inner, _Pattern.of(said.regex)])
        default = _default(said, described, annotation)
        if default is None:
            kind = Union[kind, None]  # noqa: UP007  of a computed type
        # A default that is an address is fetched too.
        return kind, Field(default, validate_default=fetches, **kept)

    def _type(self, annotation: Any) -> Any:
        """The annotation as pydantic is to read it: files are fetched, secrets wrapped."""
        if isinstance(annotation, type):
            return self._class(annotation)
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is Annotated:
            return Annotated[(self._type(arguments[0]), *arguments[1:])]
        if origin in (Union, types.UnionType):
            return Union[tuple(self._type(one) for one in arguments)]  # noqa: UP007  of a computed number
        if origin is not None and arguments and origin is not typing.Literal:
            return origin[tuple(one if one is ... else self._type(one) for one in arguments)]
        return annotation

    def _class(self, annotation: type) -> Any:
        if issubclass(annotation, PurePath):
            self._files = True
            return Annotated[Any, PlainValidator(_path(annotation)), WithJsonSchema(_URI)]
        if issubclass(annotation, io.IOBase):
            self._files = True
            return Annotated[Any, PlainValidator(_opened), WithJsonSchema(_URI)]
        if hasattr(annotation, "get_secret_value"):
            hidden = {"type": "string", "format": "password", "writeOnly": True}
            return Annotated[Any, PlainValidator(_secret(annotation)), WithJsonSchema(hidden)]
        return annotation


class _Pattern:
    """A regular expression of Python's, whose look-aheads pydantic's own lacks."""

    @staticmethod
    def of(regex: str) -> AfterValidator:
        compiled = re.compile(regex)

        def matching(value: Any) -> Any:
            if isinstance(value, str) and not compiled.search(value):
                raise ValueError(f"must match {regex!r}")
            return value

        return AfterValidator(matching)


def _chosen(annotation: Any, choices: list[Any]) -> Any:
    def among(value: Any) -> Any:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(map(repr, choices))}")
        return value

    shown = Field(json_schema_extra={"enum": list(choices)})
    return _constrained(annotation, lambda inner: Annotated[inner, AfterValidator(among), shown])


def _constrained(annotation: Any, constrain: Callable[[Any], Any]) -> Any:
    """The annotation with its innermost type constrained: a list's elements, what an Optional may hold but None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = [one if one is type(None) else _constrained(one, constrain) for one in arguments]
        return Union[tuple(inner)]  # noqa: UP007  of a computed number
    if origin is list and arguments:
        return list[_constrained(arguments[0], constrain)]  # type: ignore[misc]
    return constrain(annotation)


def _default(said: Any, described: bool, annotation: Any) -> Any:
    """`...` where the caller must say it. The real Input() has None both for no default and for None."""
    default = said.default if described else said
    unsaid = default is None and described and not isinstance(said, FieldInfo)
    if default is inspect.Parameter.empty or default is ... or unsaid:
        return None if type(None) in typing.get_args(annotation) else ...
    return default


def _path(kind: type) -> Callable[[Any, ValidationInfo], Any]:
    def fetch(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, PurePath):
            return kind(value)
        return kind(_files(info).fetch(_text(value)))

    return fetch


def _opened(value: Any, info: ValidationInfo) -> Any:
    return value if isinstance(value, io.IOBase) else _files(info).open(_text(value))


def _secret(kind: Any) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else kind(_text(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {type(value).__name__}")  # noqa: TRY004  pydantic's validators raise it
    return value


def _files(info: ValidationInfo) -> Fetched:
    if not isinstance(info.context, Fetched):
        raise TypeError("checked without a place for files")
    return info.context


def _schema_of(annotation: Any) -> dict[str, Any]:
    """The JSON schema of an answer, of each piece where it is an iterator; {} where it says nothing of use."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(origin, type) and issubclass(origin, (Iterator, AsyncIterator)):
        annotation = arguments[0] if arguments else None
    if annotation in (None, type(None), Any):
        return {}
    if isinstance(annotation, type) and issubclass(annotation, (PurePath, io.IOBase)):
        return dict(_URI)
    try:
        return TypeAdapter(annotation, config=_config_for(annotation)).json_schema(mode="serialization")
    except (PydanticUserError, PydanticSchemaGenerationError):
        return {}


def _config_for(annotation: Any) -> ConfigDict | None:
    """A model brings its own."""
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return None if is_model else ConfigDict(arbitrary_types_allowed=True)

"""Builds a pydantic model of Cog's inputs from the signature of `predict` and its `Input(...)` options."""

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
    BeforeValidator,
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
from pydantic_core import PydanticKnownError
from pydantic_core.core_schema import ErrorType

from ....errors import HandlerSignatureError
from ....foreign_json import failing_fast
from ....handlers.codec import input_error
from ....handlers.files import InputFiles
from ....handlers.handler import written
from .sdk import declared_input

# For each annotation, the Python types that a JSON value may have. Cog's server checks requests by the JSON schema of the
# inputs: 1.0 is an integer, and true is not a number.
_JSON_TYPES: dict[Any, tuple[ErrorType, tuple[type, ...]]] = {
    bool: ("bool_type", (bool,)), int: ("int_type", (int, float)), float: ("float_type", (int, float)),
}  # fmt: skip
_BOUNDS = ("ge", "le", "min_length", "max_length")
_URI = {"type": "string", "format": "uri"}
_HIDDEN = {"type": "string", "format": "password", "writeOnly": True}
# The prefix of the model's field names: pydantic reserves some names that Cog allows (`schema`, `_x`).
_PREFIX = "input_"
# As in Cog, unknown inputs are dropped, because callers also send inputs of other versions of a model.
_CONFIG = ConfigDict(extra="ignore", arbitrary_types_allowed=True, protected_namespaces=())


class CogInputs:
    """The inputs of one `predict` function: their JSON schema, and the conversion of events to arguments."""

    def __init__(self, predict: Callable[..., Any], label: str) -> None:
        """`predict` is a function or a bound method. Error messages name `label`."""
        self.has_files = False
        try:
            hints = typing.get_type_hints(written(predict), include_extras=True)
            fields = {
                _PREFIX + name: self._field(order, parameter, hints.get(name, Any))
                for order, (name, parameter) in enumerate(inspect.signature(predict).parameters.items())
                if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            }
            self.names = [field.removeprefix(_PREFIX) for field in fields]
            model = create_model("Input", __config__=_CONFIG, **fields)
            self.schema: Mapping[str, Any] = model.model_json_schema()
            self._validator = failing_fast(TypeAdapter(model))
            self.returned = hints.get("return")
            self.output_schema = _schema_of(self.returned)
        except (NameError, SyntaxError, TypeError, PydanticUserError, PydanticSchemaGenerationError) as error:
            fault = f"The inputs of {label} cannot be used: {error}"
            remedy = "Annotate with types that Cog supports: str, int, float, bool, cog.Path, list[…], Optional[…]."
            raise HandlerSignatureError(fault, remedy=remedy) from None

    def _unwrap(self, event: Any, extra: Mapping[str, Any]) -> Any:
        """Return the inputs in `event`, which may be an envelope `{"input": {…}}` or the inputs themselves.

        The event is not an envelope if one of its keys is an input other than `input`, or if `extra` has "bare". If the
        predictor has an input named `input`, only `{"input": {"input": …}}` is an envelope.
        """
        if not isinstance(event, dict) or set(event) & set(self.names) - {"input"} or extra.get("bare"):
            return {} if event is None else event
        inner = event.get("input")
        if "input" in event and ("input" not in self.names or (isinstance(inner, dict) and "input" in inner)):
            return {} if inner is None else inner
        return event

    def arguments(self, event: Any, extra: Mapping[str, Any], files: InputFiles) -> dict[str, Any]:
        """Return the arguments for `predict`. If `has_files`, block while files are downloaded into `files`.

        Raise InputInvalid, with the path of each wrong input, if inputs are wrong.
        """
        try:
            model = self._validator.validate_python(self._unwrap(event, extra), context=files)
        except ValidationError as error:
            raise input_error(error) from None
        return {name: getattr(model, _PREFIX + name) for name in self.names}

    def _field(self, order: int, parameter: inspect.Parameter, annotation: Any) -> Any:
        """Return the type and the pydantic field of a parameter. `order` is its position in the signature."""
        title = parameter.name.replace("_", " ").title()
        options: dict[str, Any] = {"alias": parameter.name, "title": title}
        chosen, default, regex = annotation, parameter.default, None
        if (declared := declared_input(default)) is not None:
            options |= {key: value for key in _BOUNDS if (value := getattr(declared, key)) is not None}
            options |= {"description": declared.description, "deprecated": declared.deprecated}
            default, regex = declared.default, declared.regex
            if declared.choices:
                chosen = _chosen(annotation, list(declared.choices))
        kind = _converted(chosen)
        is_file = _holds_file(annotation)
        self.has_files |= is_file
        if regex:
            kind = _constrained(kind, lambda inner: Annotated[inner, _pattern(regex)])
        if default is inspect.Parameter.empty or default is ...:
            default = None if type(None) in typing.get_args(annotation) else ...
        if default is None:
            kind = Union[kind, None]  # noqa: UP007  the type is computed
        # Validate the defaults of file inputs, because the validator downloads a default that is a URL.
        extra: dict[str, Any] = {"x-order": order}
        return kind, Field(default, validate_default=is_file, json_schema_extra=extra, **options)


def _holds_file(annotation: Any) -> bool:
    if isinstance(annotation, type):
        return issubclass(annotation, (PurePath, io.IOBase))
    return any(_holds_file(argument) for argument in typing.get_args(annotation))


def _converted(annotation: Any) -> Any:
    """Return the annotation with validators for Cog's types. The validators download files and wrap secrets."""
    if isinstance(annotation, type):
        return _converted_class(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return Annotated[(_converted(arguments[0]), *arguments[1:])]
    if origin in (Union, types.UnionType):
        return Union[tuple(_converted(one) for one in arguments)]  # noqa: UP007  the number is computed
    if origin is not None and arguments and origin is not typing.Literal:
        return origin[tuple(one if one is ... else _converted(one) for one in arguments)]
    return annotation


def _converted_class(annotation: type) -> Any:
    if issubclass(annotation, PurePath):
        return Annotated[Any, PlainValidator(_path(annotation)), WithJsonSchema(_URI)]
    if issubclass(annotation, io.IOBase):
        return Annotated[Any, PlainValidator(_opened), WithJsonSchema(_URI)]
    if hasattr(annotation, "get_secret_value"):
        return Annotated[Any, PlainValidator(_secret(annotation)), WithJsonSchema(_HIDDEN)]
    if annotation in _JSON_TYPES:
        return Annotated[annotation, BeforeValidator(_of_type(*_JSON_TYPES[annotation]))]
    return annotation


def _of_type(wrong: ErrorType, kinds: tuple[type, ...]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            raise PydanticKnownError(wrong)
        return value

    return check


def _pattern(regex: str) -> AfterValidator:
    """Return a validator that uses the module `re`, because the regular expressions of pydantic have no look-ahead."""
    compiled = re.compile(regex)

    def matching(value: Any) -> Any:
        if isinstance(value, str) and not compiled.match(value):
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
    """Return the annotation with `constrain` applied to the innermost type, inside its lists and Optionals."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Union, types.UnionType):
        inner = [one if one is type(None) else _constrained(one, constrain) for one in arguments]
        return Union[tuple(inner)]  # noqa: UP007  the number is computed
    if origin is list and arguments:
        return list[_constrained(arguments[0], constrain)]  # type: ignore[misc]
    return constrain(annotation)


def _path(kind: type) -> Callable[[Any, ValidationInfo[InputFiles]], Any]:
    def fetch(value: Any, info: ValidationInfo[InputFiles]) -> Any:
        return kind(value if isinstance(value, PurePath) else info.context.fetch(_text(value)))

    return fetch


def _opened(value: Any, info: ValidationInfo[InputFiles]) -> Any:
    return value if isinstance(value, io.IOBase) else info.context.open(_text(value))


def _secret(kind: Any) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kind) else kind(_text(value))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be text, not {type(value).__name__}")  # noqa: TRY004  pydantic expects ValueError
    return value


def output_adapter(returned: Any) -> TypeAdapter[Any] | None:
    """Return an adapter that checks outputs, or the pieces of an iterator. Return None if their type is unknown or Any."""
    annotation, arguments = returned, typing.get_args(returned)
    if _is_iterator(returned):
        annotation = arguments[0] if arguments else None
    if annotation in (None, type(None), Any):
        return None
    if isinstance(annotation, type) and issubclass(annotation, (PurePath, io.IOBase)):
        annotation = _file_type(annotation)
    # A pydantic model has its own configuration, so TypeAdapter refuses a second configuration for it.
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    config = None if is_model else ConfigDict(arbitrary_types_allowed=True)
    try:
        return TypeAdapter(annotation, config=config)
    except (PydanticUserError, PydanticSchemaGenerationError):
        return None


def _file_type(annotation: type) -> Any:
    base = PurePath if issubclass(annotation, PurePath) else io.IOBase
    return Annotated[Any, PlainValidator(_instance_of(base)), WithJsonSchema(_URI)]


def _instance_of(base: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        # Cog also accepts the URL of a file.
        if not isinstance(value, (base, str)):
            raise ValueError(f"must be a file, not {type(value).__name__}")  # noqa: TRY004  pydantic expects it
        return value

    return check


def _schema_of(returned: Any) -> dict[str, Any]:
    """Return the JSON schema of outputs, or of an iterator's pieces. Return {} if the type is unknown."""
    adapter = output_adapter(returned)
    try:
        schema = adapter.json_schema(mode="serialization") if adapter is not None else {}
    except PydanticUserError:
        schema = {}
    if "Concatenate" in getattr(typing.get_origin(returned), "__name__", ""):
        schema["x-cog-array-display"] = "concatenate"
    return schema


def _is_iterator(annotation: Any) -> bool:
    origin = typing.get_origin(annotation)
    return isinstance(origin, type) and issubclass(origin, (Iterator, AsyncIterator))

"""Decodes request bodies into the handler's events, and encodes the handler's answers as response bodies.

Bodies are JSON unless the handler's annotation, the request's content type or its Accept header says otherwise.
pydantic validates annotated types and generates their JSON schemas. Arrays are sent as bytes if the Accept header
prefers bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from email.message import Message
from typing import Any

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.json_schema import JsonSchemaMode

from ..errors import BadInput, InputInvalid, OutputInvalid, UnsupportedMedia
from ..foreign_json import check_json, failing_fast, first_errors, loads
from . import arrays
from .arrays import NPY_TYPE, SAFETENSORS_TYPE, TENSORS_TYPE
from .contract import NOTHING
from .negotiation import preferred

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
# The content type that `curl -d` sends by default. A body of this type is read as JSON, because its sender means JSON.
FORM_TYPE = "application/x-www-form-urlencoded"
MAX_PROBLEMS = 20
# orjson refuses values that are nested deeper than this.
MAX_DEPTH = 254
LARGEST_BITS = 63
"""orjson writes longer integers only if they are positive and have 64 bits."""
ARRAY_OFFERS = (JSON_TYPE, NPY_TYPE, BYTES_TYPE)
DICT_OFFERS = (JSON_TYPE, SAFETENSORS_TYPE)


class _Codec:
    """A codec for the type of an annotation. Without an annotation, any value is accepted, and `published` is the JSON
    schema.
    """

    _mode: JsonSchemaMode

    def __init__(self, annotation: Any | None, published: Mapping[str, Any] = NOTHING) -> None:
        self._raw = annotation is bytes
        self._adapter = None if annotation is None or self._raw else TypeAdapter(annotation)
        self._published = published

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the values. `{}` means any value."""
        return self._adapter.json_schema(mode=self._mode) if self._adapter else dict(self._published)


class InputCodec(_Codec):
    """Decodes request bodies into events of the annotated type.

    Without an annotation, an event is a JSON value or, by the content type, a string, an array or bytes.
    """

    _mode = "validation"

    def __init__(self, annotation: Any | None, published: Mapping[str, Any] = NOTHING) -> None:
        super().__init__(annotation, published)
        self._validator = None if self._adapter is None else failing_fast(self._adapter)

    def decode(self, body: bytes, content_type: str = "") -> Any:
        """Return the event in `body`.

        Raise BadInput if the body does not have the format of its content type (by default JSON), UnsupportedMedia if it has several
        parts, InputTooLarge if its JSON has too many values, and InputInvalid if the event does not fit the annotation.
        """
        if self._raw:
            return body
        kind = content_type.partition(";")[0].strip().lower() if content_type else JSON_TYPE
        if kind not in (JSON_TYPE, FORM_TYPE) and not kind.endswith("+json"):
            if kind == NPY_TYPE and self._adapter is None:
                return arrays.from_npy(body)
            event = _decode_other(body, kind, content_type)
            return event if self._validator is None else _validated(self._validator.validate_python, event)
        check_json(body)
        return _validated(self._validator.validate_json if self._validator else loads, body or b"null")


class OutputCodec(_Codec):
    """Encodes answers of the annotated type. Without an annotation, any JSON value and bytes are accepted."""

    _mode = "serialization"
    # The tensors that the annotation declares. They are read when an answer is first sent as tensors.
    _tensors: Mapping[str, Any] | None = None

    def encode(self, answer: Any, accept: str = "") -> tuple[bytes, str]:
        """Return (payload, content type): JSON, or bytes for arrays if the Accept header prefers bytes.

        An answer of bytes is sent unchanged, unless another type is annotated. Raise OutputInvalid if a part
        of the answer does not fit the annotation or has no JSON form. The error names the path of this part.
        """
        if self._adapter is not None:
            if accept.startswith(TENSORS_TYPE):
                return self._as_tensors(answer, self._adapter, accept)
            answer, plain = self._checked(answer, self._adapter)
        elif isinstance(answer, (bytes, bytearray, memoryview)):
            return bytes(answer), BYTES_TYPE
        else:
            plain = answer
        if accept and (raw := _as_bytes(answer, accept)) is not None:
            return raw
        try:
            payload = _dumped(plain)
        except (TypeError, orjson.JSONEncodeError) as error:
            payload = _dumped_with_long_integers(plain, error)
        if b"null" in payload and (path := _find_nan(answer)):
            # orjson and pydantic write NaN and infinities as null, which would be a wrong answer.
            fault = f"The answer is not JSON: {path} is NaN or infinite."
            raise OutputInvalid(fault, remedy="Return None or a finite number there.")
        return payload, JSON_TYPE

    def _as_tensors(self, answer: Any, adapter: TypeAdapter[Any], accept: str) -> tuple[bytes, str]:
        """Return (payload, content type) of an answer whose fields are tensors."""
        from . import tensors  # noqa: PLC0415  few functions have tensors

        if self._tensors is None:
            self._tensors = tensors.declared(self.schema())
        fields = adapter.dump_python(_valid(answer, adapter), mode="python")
        return tensors.encode(fields, self._tensors, accept)

    def _checked(self, answer: Any, adapter: TypeAdapter[Any]) -> tuple[Any, Any]:
        """Return (validated answer, the same answer as JSON types)."""
        valid = _valid(answer, adapter)
        try:
            return valid, adapter.dump_python(valid, mode="json", fallback=_plain)
        except (TypeError, ValueError) as error:
            # Validation accepted the value because the annotation contains `Any`.
            raise _not_json(valid, error) from None


def _valid(answer: Any, adapter: TypeAdapter[Any]) -> Any:
    """Return a validated answer. Raise OutputInvalid."""
    try:
        return adapter.validate_python(answer)
    except ValidationError as error:
        text, problems = _problems(error, "answer")
        fault = f"The answer does not fit the handler's return annotation: {text}."
        remedy = "Return what the annotation says, or change the annotation."
        raise OutputInvalid(fault, remedy=remedy, details={"problems": problems}) from None


def _validated(validate: Callable[[Any], Any], value: str | bytes) -> Any:
    try:
        return validate(value)
    except ValidationError as error:
        raise input_error(error) from None
    except orjson.JSONDecodeError as error:
        raise _bad_json(str(error)) from None


def _as_bytes(answer: Any, accept: str) -> tuple[bytes, str] | None:
    """Return (payload, content type) of an answer of arrays as bytes, or None if it must be sent as JSON."""
    if arrays.is_array(answer):
        kind = preferred(accept, ARRAY_OFFERS)
        return (arrays.to_npy(answer), kind) if kind in (NPY_TYPE, BYTES_TYPE) else None
    if arrays.is_array_dict(answer) and preferred(accept, DICT_OFFERS) == SAFETENSORS_TYPE:
        file = arrays.to_safetensors(answer)
        return (file, SAFETENSORS_TYPE) if file is not None else None
    return None


def _decode_other(body: bytes, kind: str, content_type: str) -> Any:
    if kind.startswith("multipart/"):
        fault = f"The body is {kind}, which is no event."
        remedy = "Send a file as the whole body, or JSON. A handler whose event is annotated as bytes gets the body as it is."
        raise UnsupportedMedia(fault, remedy=remedy)
    if not kind.startswith("text/") and kind != TENSORS_TYPE:
        return body
    header = Message()
    header["Content-Type"] = content_type
    if kind == TENSORS_TYPE:
        from . import tensors  # noqa: PLC0415  few functions have tensors

        return tensors.decode(body, str(header.get_param("header", "")))
    try:
        return body.decode(header.get_content_charset("utf-8"))
    except (UnicodeError, LookupError) as error:
        fault = f"The body is not {content_type!r}, as its content type says: {error}."
        raise BadInput(fault, remedy="Send UTF-8 text, or name its charset.") from None


def _bad_json(why: str) -> BadInput:
    remedy = "Send JSON, or name another content type (text/plain, application/octet-stream)."
    return BadInput(f"The body is not JSON: {why}.", remedy=remedy)


def input_error(error: ValidationError) -> BadInput | InputInvalid:
    """Return the error for an input that pydantic refused. The error names the path of each wrong field."""
    text, problems = _problems(error, "input")
    if problems[0]["type"] == "json_invalid":
        return _bad_json(problems[0]["problem"].removeprefix("Invalid JSON: "))
    fault = f"The input does not fit the function: {text}."
    return InputInvalid(fault, remedy="Its schema is in /openapi.json.", details={"problems": problems})


def _problems(error: ValidationError, root: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the first problems, as text and as JSON."""
    problems = [
        {"path": _path(root, one["loc"]), "problem": one["msg"], "type": one["type"]}
        for one in first_errors(error, MAX_PROBLEMS)
    ]
    text = "; ".join(f"{problem['path']}: {problem['problem']}" for problem in problems[:3])
    more = error.error_count() - 3
    return f"{text}; and {more} more" if more > 0 else text, problems


def _path(root: str, location: tuple[int | str, ...]) -> str:
    return root + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)


def _plain(value: Any) -> Any:
    """Return `value` as a type that orjson can write. Raise TypeError if it has no JSON form."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", fallback=_plain)
    if isinstance(value, (set, frozenset)):
        return list(value)
    if arrays.is_tensor(value):
        return arrays.to_numpy(value)
    if callable(tolist := getattr(value, "tolist", None)) and type(value).__module__ == "numpy":
        return tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _dumped(plain: Any, default: Callable[[Any], Any] = _plain) -> bytes:
    return orjson.dumps(plain, default=default, option=orjson.OPT_SERIALIZE_NUMPY)


def _dumped_with_long_integers(plain: Any, error: Exception) -> bytes:
    """Return the JSON of an answer whose integers are too long for orjson. Raise OutputInvalid if orjson refuses it for another reason."""
    try:
        return _dumped(_fragments(plain), lambda value: _fragments(_plain(value)))
    except (TypeError, orjson.JSONEncodeError, RecursionError, ValueError):
        raise _not_json(plain, error) from None


def _fragments(value: Any) -> Any:
    """Return a value in which fragments of JSON replace the integers of more than LARGEST_BITS. Models and arrays are not changed."""
    if isinstance(value, dict):
        return {key: _fragments(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_fragments(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _fragments(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        return orjson.Fragment(int.__repr__(value))
    return value


def _not_json(answer: Any, error: Exception) -> OutputInvalid:
    path, fault = _find_unwritable(answer, "answer")
    reason = f"{path} is {fault}" if fault else str(error)
    remedy = (
        "Return int, float, text, dates, lists, dicts with string keys, arrays, tensors, pydantic models or bytes, "
        "or annotate the answer: pydantic converts a Decimal, for example."
    )
    if fault in ("of type bytes", "of type bytearray", "of type memoryview"):
        remedy = (
            f"Return the bytes alone, or make {path} text, for example with base64.b64encode(...).decode()."
        )
    return OutputInvalid(f"The answer is not JSON: {reason}.", remedy=remedy)


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{path}.{key}", item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(f"{path}{{}}", item) for item in value]
    if isinstance(value, BaseModel):
        return [(f"{path}.{name}", item) for name, item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f"{path}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _find_unwritable(value: Any, path: str, depth: int = 0) -> tuple[str, str]:
    """Return (path, description) of the first part of `value` that has no JSON form; else ("", "")."""
    if depth > MAX_DEPTH:
        return "it", f"nested more than {MAX_DEPTH} levels deep"
    for key in value if isinstance(value, dict) else ():
        if not isinstance(key, str):
            return path, f"a dict with the key {key!r} of type {type(key).__name__}"
    try:
        orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, orjson.JSONEncodeError) as error:
        for step, item in _children(value, path):
            if (found := _find_unwritable(item, step, depth + 1))[1]:
                return found
        # Numbers and strings have a JSON form, so the message must also say what is wrong with this value.
        why = f": {error}" if isinstance(value, (int, str)) else ""
        return path, f"of type {type(value).__name__}{why}"
    return "", ""


def _find_nan(answer: Any) -> str:
    """Return the path of the first NaN or infinity in `answer`, or "" if there is none."""
    stack = [("answer", answer)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return path
        if arrays.is_tensor(value):
            value = arrays.to_numpy(value)
        if type(value).__module__ == "numpy":
            value = value.tolist()
            if not isinstance(value, list):
                stack.append((path, value))
        stack.extend(reversed(_children(value, path)))
    return ""

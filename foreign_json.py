"""Limits the cost of JSON that others write: callers, handlers, and servers from which weights are fetched.

A parser holds the interpreter until it has made all values, and a short text such as `[[],[],...]` can have millions of them. So
the marks between values are counted before the text is parsed, which takes a small part of the parser's time. A text may have 2
million numbers, a million empty lists, or 400,000 members of objects.

A wrong input costs no more than a right one. pydantic goes on after an error: a list of 400,000 wrong items has 400,000 errors,
which take 1 s and 400 MB. Here, the validation of each list, set and dict ends at its first wrong item.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import orjson

from .errors import InputTooLarge

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError
    from pydantic_core import ErrorDetails, SchemaValidator

MAX_MARKS = 2_000_000
WEIGHTS = {",": 1, "[": 2, "{": 2, ":": 4}
"""How much each mark counts: about the time to make the value that the mark stands for, in tenths of a microsecond."""
# A run of at least 19 digits may be an integer of more than 64 bits. A pattern over a whole body would hold the interpreter much longer
# than `translate` and `find`.
_ZEROS, _LONG, _RUN = bytes.maketrans(b"123456789", b"0" * 9), b"0" * 19, re.compile(b"0+")
_SHORT = MAX_MARKS // max(WEIGHTS.values())
REMEDY = (
    "Send numbers as application/x-npy or safetensors, and long texts as text/plain, or send less at a time."
)
MOST_ERRORS = 1000
"""More errors than this are counted, but not described: an object for a model may have any number of unknown fields, each an error."""
_CONTAINERS = frozenset(("list", "tuple", "set", "frozenset", "dict"))
# These members of a schema are values and not schemas, so `_failing_fast` does not change them.
_VALUES = frozenset(("default", "expected", "metadata", "serialization", "ref", "schema_ref"))


def excess(text: bytes | str) -> str:
    """Return what a JSON text has too much of; "" if nothing. The marks in its strings count, too."""
    # Do not count the marks of most texts, which are too short to exceed the limit.
    if len(text) <= _SHORT:
        return ""
    if isinstance(text, str):
        marks = sum(weight * text.count(mark) for mark, weight in WEIGHTS.items())
    else:
        marks = sum(weight * text.count(mark.encode()) for mark, weight in WEIGHTS.items())
    if marks <= MAX_MARKS:
        return ""
    weights = ", ".join(f"{mark} as {weight}" for mark, weight in WEIGHTS.items())
    return f"{marks} marks of values, of at most {MAX_MARKS} (counting {weights})"


def check_json(text: bytes | str) -> None:
    """Raise InputTooLarge if a JSON text of a caller has too many values."""
    if why := excess(text):
        raise InputTooLarge(f"The JSON has {why}.", remedy=REMEDY)


def loads(text: bytes | str) -> Any:
    """Return the value of a JSON text, with integers of any size. Raises orjson.JSONDecodeError."""
    value = orjson.loads(text)
    # orjson returns a float for an integer that needs more than 64 bits.
    if not isinstance(value, (dict, list, float)) or not _may_have_long_integer(text):
        return value
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise orjson.JSONDecodeError(f"a number is too long, or nested too deeply: {error}", "", 0) from None


def _may_have_long_integer(text: bytes | str) -> bool:
    digits = (text.encode() if isinstance(text, str) else text).translate(_ZEROS)
    at = digits.find(_LONG)
    # Skip a run after a point, because it is the fraction of a float.
    while at > 0 and digits[at - 1 : at] == b"." and (run := _RUN.match(digits, at)):
        at = digits.find(_LONG, run.end())
    return at >= 0


def dumps(value: Any) -> bytes:
    """Return a result of `loads` as a JSON text. Raises orjson.JSONEncodeError if it is nested too deeply."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        if "64-bit" not in str(error):
            raise
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except RecursionError as error:
        raise orjson.JSONEncodeError(str(error)) from None


def failing_fast(adapter: TypeAdapter[Any]) -> SchemaValidator:
    """Return a validator like the adapter's, whose containers fail at their first wrong item."""
    # Imported here, because `import pilotflame` must not load pydantic.
    from pydantic_core import SchemaValidator  # noqa: PLC0415

    # By default, pydantic uses the prebuilt validators of the models inside, which do not fail fast. pydantic 2.11 has no option to avoid this.
    known = "_use_prebuilt" in str(SchemaValidator.__text_signature__)
    anew: dict[str, Any] = {"_use_prebuilt": False} if known else {}
    return SchemaValidator(_failing_fast(adapter.core_schema), **anew)


def _failing_fast(part: Any) -> Any:
    if isinstance(part, (list, tuple)):
        return type(part)(map(_failing_fast, part))
    if not isinstance(part, Mapping):
        return part
    if not isinstance(kind := part.get("type"), str):
        # `part` has schemas by name, such as those of the fields of a model. A field may be called "type".
        return {name: _failing_fast(one) for name, one in part.items()}
    found = {name: one if name in _VALUES else _failing_fast(one) for name, one in part.items()}
    return found | {"fail_fast": True} if kind in _CONTAINERS else found


def first_errors(error: ValidationError, most: int, *, values: bool = False) -> list[ErrorDetails]:
    """Return the first `most` errors, or one error with their number if there are more than MOST_ERRORS. With `values`, the errors contain the
    wrong values. Never return an empty list.
    """
    if (count := error.error_count()) > MOST_ERRORS:
        return [{"type": "too_many_errors", "loc": (), "msg": f"{count} fields are wrong", "input": None}]
    return error.errors(include_url=False, include_input=values, include_context=values)[:most]


def is_compact(body: bytes) -> bool:
    """Return True if a body is JSON that has the same bytes after it was parsed and written again by orjson."""
    try:
        return not excess(body) and orjson.dumps(orjson.loads(body)) == body
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return False

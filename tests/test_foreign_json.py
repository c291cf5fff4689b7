"""The values of a JSON text are counted before it is parsed, and a wrong input costs no more than a right one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import InputTooLarge
from pilotflame.foreign_json import (
    MAX_MARKS,
    MOST_ERRORS,
    check_json,
    dumps,
    excess,
    failing_fast,
    first_errors,
    is_compact,
    loads,
)
from pydantic import BaseModel, ConfigDict, Discriminator, TypeAdapter, ValidationError


def repeated(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


TOO_MANY = {
    "lists": repeated(b"[]", 800_000),
    "objects": repeated(b"{}", 800_000),
    "numbers": repeated(b"1", MAX_MARKS + 2),
    "texts": repeated(b'""', MAX_MARKS + 2),
    "members": b"{" + b",".join(b'"%x":1' % number for number in range(410_000)) + b"}",
    "nested": b"[" * 1_100_000,
    "broken": b"[{[{:,[{" * 200_000,
}
ALLOWED = {
    "a file in base64": b'{"image":"' + b"QUJD" * (5 << 20) + b'"}',
    "an image as lists": repeated(repeated(repeated(b"255", 3), 512), 512),
    "embeddings": repeated(repeated(b"0.12345", 768), 1_000),
    "rows": repeated(b'{"a":1,"b":2.5,"c":"x"}', 80_000),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_too_many_values_are_counted_before_they_are_made(name: str) -> None:
    for text in (TOO_MANY[name], TOO_MANY[name].decode()):
        with pytest.raises(InputTooLarge, match=f"of at most {MAX_MARKS}") as caught:
            check_json(text)
        assert caught.value.remedy


@pytest.mark.parametrize("name", ALLOWED)
def test_large_texts_and_usual_arrays_are_allowed(name: str) -> None:
    check_json(ALLOWED[name])
    assert orjson.loads(ALLOWED[name])


def test_the_limit_is_reached_exactly() -> None:
    # The list alone counts as 2 marks.
    fits = repeated(b"1", MAX_MARKS - 1)
    assert excess(fits) == ""
    assert excess(b"[" + fits)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    | st.integers(min_value=1 << 62, max_value=1 << 66) | st.integers(min_value=-(1 << 66), max_value=-(1 << 62)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def typed(value: Any) -> str:
    """Return a text that differs for 1 and 1.0, and for 0.0 and -0.0."""
    return repr(value)


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_a_text_has_the_values_that_pythons_json_reads(value: Any, indent: int | None, plain: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=plain)
    assert typed(loads(text)) == typed(loads(text.encode())) == typed(json.loads(text)) == typed(value)
    assert typed(json.loads(dumps(value))) == typed(value)


@pytest.mark.parametrize(
    "text",
    ["NaN", '{"a": [Infinity]}', "[-Infinity]", "1e999", '"\\ud800"', '["\\udc00\\ud800"]', "9" * 5000, "[" * 995 + "9" * 30 + "]" * 995],
    ids=["nan", "infinity", "-infinity", "large float", "half a pair", "swapped pair", "long integer", "deep"],
)  # fmt: skip
def test_a_text_that_cannot_be_passed_on_is_refused(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(orjson.JSONDecodeError):
            loads(form)


def test_a_value_that_is_nested_too_deeply_is_not_written() -> None:
    value: Any = 1 << 70
    for _ in range(2000):
        value = [value]
    with pytest.raises(orjson.JSONEncodeError):
        dumps(value)


class Item(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["item"] = "item"
    number: int
    nested: list[Item] = []


class Other(BaseModel):
    kind: Literal["other"]
    type: list[int] = []
    text: str
    default: dict[str, Any] = {"type": "list"}


ADAPTERS: list[TypeAdapter[Any]] = [
    TypeAdapter(Item),
    TypeAdapter(list[Item | str]),
    TypeAdapter(dict[str, tuple[int, ...]]),
    TypeAdapter(list[Annotated[Item | Other, Discriminator("kind")]]),
    TypeAdapter(set[int] | frozenset[str] | None),
]
JSON = st.recursive(
    st.none() | st.integers() | st.sampled_from(["item", "other", "1", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["kind", "number", "nested", "text", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=str)
@given(value=JSON)
def test_it_accepts_what_the_adapter_accepts(adapter: TypeAdapter[Any], value: Any) -> None:
    assert _outcome(failing_fast(adapter).validate_python, value) == _outcome(adapter.validate_python, value)


def _outcome(validate: Callable[[Any], Any], value: Any) -> Any:
    """Return the valid value, or the place of the first error."""
    try:
        return validate(value)
    except ValidationError as error:
        return first_errors(error, 1)[0]["loc"]


@pytest.mark.parametrize(
    "value",
    [[None] * 100_000, [{"kind": "item", "number": None}] * 50_000, [{"nested": [{}] * 50_000}]],
    ids=["values", "objects", "nested"],
)
def test_each_list_ends_at_its_first_wrong_item(value: Any) -> None:
    with pytest.raises(ValidationError) as found:
        failing_fast(TypeAdapter(list[Item | str])).validate_python(value)
    assert found.value.error_count() < 10


def test_many_unknown_fields_are_counted_and_not_described() -> None:
    value = {"number": 1, **{f"x{number}": 0 for number in range(MOST_ERRORS + 1)}}
    with pytest.raises(ValidationError) as found:
        failing_fast(TypeAdapter(Item)).validate_python(value)
    assert first_errors(found.value, 20) == [
        {"type": "too_many_errors", "loc": (), "msg": "1001 fields are wrong", "input": None}
    ]
    del value["x0"]
    with pytest.raises(ValidationError) as found:
        failing_fast(TypeAdapter(Item)).validate_python(value)
    assert len(first_errors(found.value, 20)) == 20


@pytest.mark.parametrize(
    "number", ["0.1234567890123456789", "1.0000000000000000000001", "5e0000000000000000000001"]
)
def test_a_float_with_a_long_fraction_hides_no_integer_behind_it(number: str) -> None:
    for text in (f"[{number},{2**64}]", f"[{number},[{number}],{-(2**64)}]", f'{{"a":{number},"b":{2**64}}}'):
        assert repr(loads(text)) == repr(json.loads(text))


@pytest.mark.parametrize(
    "text", ['{"a":1}', '"quoted"', "null", "1.5", '{"a": 1}', "1e5", "plain", "12345678901234567890123", ""]
)
def test_compact_json_is_written_again_as_it_was(text: str) -> None:
    assert is_compact(text.encode()) == (text in ('{"a":1}', '"quoted"', "null", "1.5"))

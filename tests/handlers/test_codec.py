"""Request and response bodies: what is decoded, what is refused, and which place the refusal names."""

import dataclasses
import datetime
import enum
import json
import math
import uuid
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput, InputInvalid, OutputInvalid, UnsupportedMedia
from pilotflame.handlers.codec import (
    BYTES_TYPE,
    FORM_TYPE,
    JSON_TYPE,
    MAX_PROBLEMS,
    InputCodec,
    OutputCodec,
)
from pydantic import BaseModel, Field, create_model, field_validator

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


class Size(BaseModel):
    width: int
    height: Annotated[int, Field(gt=0)]


class Picture(BaseModel):
    name: str
    sizes: list[Size] = []
    mode: Literal["L", "RGB"] = "L"


# -- in


@given(JSON_VALUES)
def test_any_json_is_taken_without_an_annotation(value: Any) -> None:
    assert InputCodec(None).decode(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "content_type",
    ["", JSON_TYPE, "Application/JSON; charset=utf-8", FORM_TYPE, "application/ld+json", "application/vnd.x+json; a=b"],
)  # fmt: skip
def test_json_goes_by_many_names(content_type: str) -> None:
    assert InputCodec(None).decode(b'{"a":1}', content_type) == {"a": 1}
    assert InputCodec(dict[str, int]).decode(b'{"a":1}', content_type) == {"a": 1}


def test_no_body_is_null() -> None:
    assert InputCodec(None).decode(b"") is None
    assert InputCodec(int | None).decode(b"") is None
    with pytest.raises(InputInvalid):
        InputCodec(int).decode(b"")


@pytest.mark.parametrize("annotation", [None, Picture, dict[str, int], int])
@pytest.mark.parametrize("body", [b"{", b'{"a":}', b"nope", b"\xff\xfe", b'{"a":1} x', b"'a'"])
def test_what_is_not_json_is_bad_json_whatever_the_annotation(annotation: Any, body: bytes) -> None:
    with pytest.raises(BadInput, match="The body is not JSON") as caught:
        InputCodec(annotation).decode(body)
    assert (caught.value.status, caught.value.code) == (400, "bad_json")
    assert caught.value.remedy


@pytest.mark.parametrize("annotation", [None, object, dict[str, list[int]], dict[str, Any]])
def test_whole_numbers_are_never_rounded(annotation: Any) -> None:
    event = {"ids": [1 << 64, -(1 << 63) - 1, 12345678901234567890123]}
    assert InputCodec(annotation).decode(json.dumps(event).encode()) == event


def test_deep_nesting_is_refused_not_crashed_on() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    for annotation in (None, list[Any]):
        with pytest.raises(BadInput):
            InputCodec(annotation).decode(deep)


def test_a_model_is_built() -> None:
    event = InputCodec(Picture).decode(b'{"name":"a","sizes":[{"width":1,"height":2}]}')
    assert event == Picture(name="a", sizes=[Size(width=1, height=2)])


def test_every_problem_is_named_by_its_path() -> None:
    body = b'{"sizes":[{"width":1,"height":2},{"width":"x","height":0}],"mode":"CMYK"}'
    with pytest.raises(InputInvalid) as caught:
        InputCodec(Picture).decode(body)
    error = caught.value
    assert error.status == 422
    assert {problem["path"] for problem in error.details["problems"]} == {
        "input.name",
        "input.sizes[1].width",
        "input.sizes[1].height",
        "input.mode",
    }
    assert "input.name: Field required" in error.message
    assert "and 1 more" in error.message
    assert "openapi" in error.remedy


def test_problems_do_not_repeat_the_body_back_and_are_limited() -> None:
    with pytest.raises(InputInvalid) as caught:
        InputCodec(create_model("Wide", **{f"n{number}": int for number in range(1000)})).decode(
            json.dumps({f"n{number}": "hunter2" for number in range(1000)}).encode()
        )
    assert len(caught.value.details["problems"]) == MAX_PROBLEMS
    assert "hunter2" not in json.dumps(caught.value.to_wire())
    assert "and 997 more" in caught.value.message


def test_a_problem_at_the_root_is_called_the_input() -> None:
    with pytest.raises(InputInvalid) as caught:
        InputCodec(int).decode(b'"five"')
    assert caught.value.details["problems"][0]["path"] == "input"


def test_a_validator_of_the_user_speaks() -> None:
    class Even(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def even(cls, n: int) -> int:
            if n % 2:
                raise ValueError("must be even")
            return n

    with pytest.raises(InputInvalid, match=r"input\.n: Value error, must be even") as caught:
        InputCodec(Even).decode(b'{"n":3}')
    json.dumps(caught.value.to_wire())  # can be sent, although it was made from an exception


@given(st.binary())
def test_bytes_are_raw_whatever_they_are_called(body: bytes) -> None:
    codec = InputCodec(bytes)
    for content_type in ("", JSON_TYPE, "image/png", "text/plain; charset=utf-16"):
        assert codec.decode(body, content_type) == body
    assert codec.schema() == {}


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_decoded_by_its_charset(text: str) -> None:
    codec = InputCodec(None)
    assert codec.decode(text.encode(), "text/plain") == text
    assert codec.decode(text.encode("utf-16"), 'text/plain; charset="utf-16"') == text
    assert codec.decode(text.encode(), "text/plain; charset=utf-8; format=flowed") == text
    assert codec.decode(text.encode(), "text/plain; Charset=UTF-8") == text
    assert InputCodec(str).decode(text.encode(), "text/html") == text


@pytest.mark.parametrize(
    ("body", "charset"),
    [(b"\xff", "utf-8"), (b"x", "no-such"), (b"x", "undefined"), (b"x", "base64"), (b"xn--\xff", "idna"), (b"x", "rot13")],
)  # fmt: skip
def test_text_in_another_charset_than_declared_is_refused(body: bytes, charset: str) -> None:
    with pytest.raises(BadInput, match="The body is not 'text/plain") as caught:
        InputCodec(None).decode(body, f"text/plain; charset={charset}")
    assert charset in caught.value.message


def test_other_types_arrive_as_bytes_or_are_validated() -> None:
    assert InputCodec(None).decode(b"\x89PNG", "image/png") == b"\x89PNG"
    with pytest.raises(InputInvalid):
        InputCodec(Picture).decode(b"\x89PNG", "image/png")


def test_the_schema_is_the_annotations() -> None:
    assert InputCodec(None).schema() == {}
    schema = InputCodec(Picture).schema()
    assert schema["required"] == ["name"]
    assert schema["$defs"]["Size"]["properties"]["height"]["exclusiveMinimum"] == 0


# -- out


@given(JSON_VALUES)
def test_json_answers_come_back_the_same(value: Any) -> None:
    for codec in (OutputCodec(None), OutputCodec(Any)):
        payload, content_type = codec.encode(value)
        assert json.loads(payload) == value
        assert content_type == JSON_TYPE


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("annotation", [None, bytes])
def test_bytes_are_answered_as_they_are(kind: type, annotation: Any) -> None:
    assert OutputCodec(annotation).encode(kind(b"\x00\xff")) == (b"\x00\xff", BYTES_TYPE)


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float
    label: Any = None


NICE = [
    (np.float32(0.5), 0.5),
    (np.int64(7), 7),
    (np.arange(4, dtype=np.float32).reshape(2, 2), [[0.0, 1.0], [2.0, 3.0]]),
    ({"v": np.ones(2)}, {"v": [1.0, 1.0]}),
    (np.arange(6.0).reshape(2, 3)[:, :1], [[0.0], [3.0]]),  # not contiguous
    (np.float16([0.5]), [0.5]),
    (np.array(["a", None], dtype=object), ["a", None]),
    ({1}, [1]),
    (frozenset({"a"}), ["a"]),
    ((1, 2), [1, 2]),
    (Picture(name="a"), {"name": "a", "sizes": [], "mode": "L"}),
    ([Size(width=1, height=2)], [{"width": 1, "height": 2}]),
    (Point(0.5, "a"), {"x": 0.5, "label": "a"}),
    (Color.RED, "red"),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
    ("null", "null"),
    ([None, "null"], [None, "null"]),
]


@pytest.mark.parametrize(("answer", "expected"), NICE, ids=lambda value: type(value).__name__)
def test_what_plainly_means_json_becomes_it(answer: Any, expected: Any) -> None:
    assert json.loads(OutputCodec(None).encode(answer)[0]) == expected


WRONG = [
    (object(), "answer is of type object"),
    ({"a": [1, {"b": object()}]}, r"answer\.a\[1\]\.b is of type object"),
    ((1, 2j), r"answer\[1\] is of type complex"),
    ({"a": {1: 2}}, r"answer\.a is a dict with the key 1 of type int"),
    ({"a": b"x"}, r"answer\.a is of type bytes"),
    ([Point(1.0, object())], r"answer\[0\]\.label is of type object"),
    ({"s": "\ud800"}, r"answer\.s is .*(surrogate|UTF-8)"),
    (np.array([1j]), "answer is of type ndarray"),
    ([Picture.model_construct(name=1j)], r"answer\[0\]\.name is of type complex"),
    ([{1j}], r"answer\[0\].* is of type complex"),
    (lambda: 1, "answer is of type function"),
]


@pytest.mark.parametrize(("answer", "expected"), WRONG)
def test_what_is_not_json_is_named_by_its_path(answer: Any, expected: str) -> None:
    with pytest.raises(OutputInvalid, match=expected) as caught:
        OutputCodec(None).encode(answer)
    assert caught.value.status == 500
    assert caught.value.remedy


@pytest.mark.parametrize("value", [b"x", bytearray(b"x")])
def test_the_remedy_for_bytes_in_a_dict_names_their_key(value: Any) -> None:
    with pytest.raises(OutputInvalid) as caught:
        OutputCodec(None).encode({"picture": {"raw": value}})
    assert "make answer.picture.raw text" in caught.value.remedy


def test_an_answer_that_holds_itself_is_refused() -> None:
    answer: list[Any] = []
    answer.append(answer)
    with pytest.raises(OutputInvalid, match="not JSON"):
        OutputCodec(None).encode(answer)


BAD_NUMBERS = [math.nan, math.inf, -math.inf, np.float32("nan"), np.float64("inf")]


@pytest.mark.parametrize("number", BAD_NUMBERS)
def test_nan_is_an_error_not_a_null(number: float) -> None:
    class Score(BaseModel):
        value: Any

    for answer, path in [
        (number, "answer"),
        ({"a": [None, number]}, r"answer\.a\[1\]"),
        ({"v": np.array([[1.0, number]])}, r"answer\.v\[0\]\[1\]"),
        ([Point(number)], r"answer\[0\]\.x"),
        ({number}, "answer"),
        ([Score(value=number)], r"answer\[0\]\.value"),
    ]:
        with pytest.raises(OutputInvalid, match=f"{path}.* is NaN or infinite"):
            OutputCodec(None).encode(answer)


def test_nan_is_an_error_with_an_annotation_too() -> None:
    class Scores(BaseModel):
        values: list[float]

    for annotation, answer, path in [
        (list[float], [1.0, math.nan], r"answer\[1\]"),
        (Scores, Scores(values=[math.inf]), r"answer\.values\[0\]"),
        (Scores, {"values": [math.inf]}, r"answer\.values\[0\]"),
        (dict[str, Any], {"a": math.nan}, r"answer\.a"),
    ]:
        with pytest.raises(OutputInvalid, match=f"{path} is NaN or infinite"):
            OutputCodec(annotation).encode(answer)


def test_an_annotated_answer_is_checked_and_its_problems_named() -> None:
    codec = OutputCodec(list[Size])
    assert json.loads(codec.encode([{"width": "1", "height": 2}])[0]) == [{"width": 1, "height": 2}]
    with pytest.raises(OutputInvalid) as caught:
        codec.encode([{"width": 1, "height": 2}, {"width": 1, "height": 0}])
    assert [problem["path"] for problem in caught.value.details["problems"]] == ["answer[1].height"]
    assert "return annotation" in caught.value.message


@pytest.mark.parametrize("value", [object(), b"\xff", {"deep": [object()]}])
def test_an_annotation_that_lets_anything_through_does_not_let_it_out(value: Any) -> None:
    with pytest.raises(OutputInvalid, match="not JSON"):
        OutputCodec(dict[str, Any]).encode({"a": value})


def test_numpy_fits_where_the_annotation_lets_anything_through() -> None:
    answer = {"v": np.ones(2, dtype=np.float32), "n": np.int64(3)}
    assert json.loads(OutputCodec(dict[str, Any]).encode(answer)[0]) == {"v": [1.0, 1.0], "n": 3}


def test_the_output_schema_is_what_is_sent_not_what_is_taken() -> None:
    class Aliased(BaseModel):
        when: datetime.date = datetime.date(2026, 1, 1)

    assert OutputCodec(None).schema() == {}
    assert OutputCodec(Aliased).schema()["properties"]["when"]["format"] == "date"


@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x", "multipart/mixed", "Multipart/Form-Data"]
)
def test_a_body_of_several_parts_is_refused_unless_bytes_are_annotated(kind: str) -> None:
    with pytest.raises(UnsupportedMedia, match="is no event") as caught:
        InputCodec(None).decode(b"--x--", kind)
    assert "Send a file as the whole body" in caught.value.remedy
    assert InputCodec(bytes).decode(b"--x--", kind) == b"--x--"


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 10**400, 2**64 - 1, -(2**63)])
def test_integers_of_any_size_are_written_with_all_digits(value: int) -> None:
    answer = {"a": [value, (value, "x")], "b": {1.5}}
    payload, kind = OutputCodec(None).encode(answer)
    assert kind == JSON_TYPE
    assert json.loads(payload) == {"a": [value, [value, "x"]], "b": [1.5]}
    with pytest.raises(OutputInvalid, match="key 1 of type int"):
        OutputCodec(None).encode({1: value})
    model = create_model("Found", n=(int, ...))
    told = dataclasses.make_dataclass("Told", ["n"])
    for nested in (told(value), {"n": {value}}, [model(n=value)], np.array([value], dtype=object)):
        assert str(value).encode() in OutputCodec(None).encode(nested)[0]
    assert str(value).encode() in OutputCodec(model).encode(model(n=value))[0]

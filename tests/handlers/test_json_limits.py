"""The values of a JSON text are counted before it is parsed. Long texts stay allowed, and so do arrays of usual sizes."""

from __future__ import annotations

import orjson
import pytest
from pilotflame.errors import InputTooLarge
from pilotflame.handlers.json_limits import MAX_MARKS, check_json, excess


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
    # The list counts 2.
    fits = repeated(b"1", MAX_MARKS - 1)
    assert excess(fits) == ""
    assert excess(b"[" + fits)

"""Forms are parsed as they arrive, in any pieces, and a broken form is the request's fault."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pilotflame.errors import BadInput
from pilotflame.handlers.forms import MAX_FIELDS, MAX_HEAD_BYTES, FormField, FormParser

TYPE = 'multipart/form-data; boundary="a b"'


def form(*fields: tuple[str, bytes]) -> bytes:
    parts = (b"--a b\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in fields)
    return b"".join(parts) + b"--a b--\r\n"


def parsed(body: bytes, size: int = 1 << 20, content_type: str = TYPE) -> list[tuple[FormField, bytes]]:
    parser, found = FormParser(content_type), list[tuple[FormField, bytes]]()
    for start in range(0, len(body), size):
        for one in parser.feed(body[start : start + size]):
            if isinstance(one, FormField):
                found.append((one, b""))
            else:
                found[-1] = found[-1][0], found[-1][1] + one
    parser.end()
    return found


FIELDS = [
    ('Content-Disposition: form-data; name="content"; filename="ä \\" b.bin"\r\nContent-Type: image/png', b"\0\r\n--a \r\n--a"),
    ("content-disposition: form-data; name*=UTF-8''gr%C3%B6%C3%9Fe", b""),
    ("X-Other: 1", b"\r\n\r\n"),
]  # fmt: skip
FOUND = [
    (FormField("content", 'ä " b.bin', "image/png"), FIELDS[0][1]),
    (FormField("größe", "", ""), b""),
    (FormField("", "", ""), b"\r\n\r\n"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_form_in_pieces_of_any_size(size: int) -> None:
    assert parsed(form(*FIELDS), size) == FOUND
    # A preamble and an epilogue are skipped.
    assert parsed(b"before\r\n--a\r\n" + form(*FIELDS) + b"after --a b\r\n\r\n\r\n", size) == FOUND


@pytest.mark.parametrize(
    "body",
    [
        b"", b"--a b", b"--a b--x--a c", form(*FIELDS)[:-5], form(*FIELDS).replace(b"--a b--", b""),
        b"--a bX-Y: 1\r\n\r\n--a b--", b"--a b\r\nX-Y: 1\r\n--a b\r\n\r\n\r\n--a b--",
        form(("X-Y: " + "1" * MAX_HEAD_BYTES, b"")), b"--a b" + b" " * MAX_HEAD_BYTES, b"--a b\r\n" + b"x" * (1 << 20),
    ],
)  # fmt: skip
def test_a_broken_form_is_refused(body: bytes) -> None:
    if body == b"--a b--x--a c":
        # The bytes after the last boundary are ignored.
        assert parsed(body) == []
        return
    with pytest.raises(BadInput, match="malformed"):
        parsed(body)


@pytest.mark.parametrize("content_type", ["multipart/form-data", 'multipart/form-data; boundary=""', "\r\n"])
def test_a_form_without_a_boundary_is_refused(content_type: str) -> None:
    with pytest.raises(BadInput, match="malformed"):
        FormParser(content_type)


def test_the_fields_are_counted() -> None:
    assert len(parsed(form(*[("X: 1", b"")] * MAX_FIELDS))) == MAX_FIELDS
    with pytest.raises(BadInput, match=f"more than {MAX_FIELDS} fields"):
        parsed(form(*[("X: 1", b"")] * 40_000))


HEADERS = st.sampled_from(
    ["Content-Disposition: form-data; ", "Content-Type: ", "name", "filename", "*", "0", "=", '"', ";", "utf-8''", "%", "ü", "\n", " "]
)  # fmt: skip


@given(st.lists(HEADERS, max_size=20))
@example(["Content-Disposition: form-data; ", "name", "*", "0", "*", "=", "%"])
@settings(max_examples=200)
def test_unusual_headers_are_read_or_refused(words: list[str]) -> None:
    with contextlib.suppress(BadInput):
        (field, _), *_ = parsed(form(("".join(words), b"x")))
        assert all(isinstance(one, str) for one in field)


@given(st.binary(max_size=60), st.integers(1, 9))
def test_any_bytes_are_read_or_refused(body: bytes, size: int) -> None:
    with contextlib.suppress(BadInput):
        parsed(b"--a b\r\n" + body, size)

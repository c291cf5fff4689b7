"""Pieces of responses and messages of WebSockets: what is encoded is decoded, and what is malformed is refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pilotflame.errors import LinkError, OutputInvalid
from pilotflame.runtime.calls.link.stream_credit import PIECE_BYTES
from pilotflame.runtime.plugins.asgi.messages import (
    ACCEPT,
    BYTES,
    CLOSE,
    TEXT,
    MessageParts,
    decode_accept,
    decode_close,
    decode_head,
    decode_response,
    encode_accept,
    encode_close,
    encode_head,
    encode_message,
    encode_response,
    parts,
)

TOKENS = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
NAMES = st.text(TOKENS, min_size=1).map(str.encode)
VALUES = st.binary().map(lambda value: bytes(byte for byte in value if byte not in b"\r\n\0"))
HEADERS = st.lists(st.tuples(NAMES, VALUES))


@given(HEADERS)
def test_headers_of_any_bytes_pass(headers: list[tuple[bytes, bytes]]) -> None:
    assert decode_head(encode_head(headers)) == headers


@given(st.binary(), st.sampled_from(b"\r\n\0"), st.binary())
def test_no_header_ends_its_line(before: bytes, end: int, after: bytes) -> None:
    with pytest.raises(OutputInvalid, match="not valid in HTTP"):
        encode_head([(b"x", before + bytes((end,)) + after)])


@given(HEADERS, NAMES, VALUES)
def test_no_header_hides_another_header(
    headers: list[tuple[bytes, bytes]], name: bytes, value: bytes
) -> None:
    with pytest.raises(OutputInvalid, match="not valid in HTTP"):
        encode_head([*headers, (b"x", b"1\r\n" + name + b": " + value)])


@example(b"0: ")
@given(st.binary().filter(lambda name: not name or any(chr(byte) not in TOKENS for byte in name)))
def test_no_name_of_a_header_is_no_token(name: bytes) -> None:
    with pytest.raises(OutputInvalid, match="not valid in HTTP"):
        encode_head([(name, b"x")])


def test_the_headers_have_a_limit() -> None:
    with pytest.raises(OutputInvalid, match="more than"):
        encode_head([(b"x", b"y" * (64 << 10))])


@given(st.integers(100, 999), HEADERS, st.binary(), st.booleans())
def test_the_first_piece_has_status_headers_and_body(
    status: int, headers: list[tuple[bytes, bytes]], body: bytes, last: bool
) -> None:
    head = encode_head(headers)
    piece = encode_response(body, status=status, head=head, last=last)
    assert decode_response(piece) == (status, head, body, last)


@given(st.binary(), st.booleans())
def test_a_later_piece_has_a_body(body: bytes, last: bool) -> None:
    assert decode_response(encode_response(body, last=last)) == (0, b"", body, last)


@given(st.binary())
def test_any_bytes_are_a_piece_or_refused(piece: bytes) -> None:
    try:
        found = decode_response(piece)
    except LinkError:
        return
    assert found.status == 0 or 100 <= found.status <= 999
    assert len(found.head) + len(found.body) < len(piece)


@given(st.binary(max_size=100), st.integers(1, 20))
def test_parts_are_the_whole(body: bytes, size: int) -> None:
    found = list(parts(body, size))
    assert b"".join(found) == body
    assert found
    assert all(0 < len(part) <= size for part in found if body)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 16, PIECE_BYTES, 3 * PIECE_BYTES + 1])
@pytest.mark.parametrize("kind", [TEXT, BYTES])
def test_a_message_of_any_length_passes_in_pieces(kind: int, size: int) -> None:
    data, joined = b"x" * size, MessageParts(size)
    pieces = encode_message(kind, data)
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)
    assert [joined.add(piece) for piece in pieces] == [None] * (len(pieces) - 1) + [(kind, data)]
    # After a complete message, the next piece begins a new message.
    assert joined.add(encode_message(kind, b"")[0]) == (kind, b"")


def test_a_message_has_a_limit() -> None:
    with pytest.raises(OutputInvalid, match="more than 9 bytes"):
        MessageParts(9).add(encode_message(TEXT, b"x" * 10)[0])
    with pytest.raises(LinkError, match="empty"):
        MessageParts(9).add(b"")


@given(st.integers(0, 65535), st.text(max_size=30))
def test_a_close_has_its_code_and_reason(code: int, reason: str) -> None:
    message = encode_close(code, reason)
    assert message[0] == CLOSE
    plain = reason.encode("utf-8", "replace")[:123].decode("utf-8", "ignore")
    assert decode_close(message[1:]) == (code, plain)


def test_a_close_without_a_code_is_refused() -> None:
    with pytest.raises(LinkError, match="no code"):
        decode_close(b"\x01")


@given(st.text(TOKENS), HEADERS)
def test_an_accept_has_its_subprotocol_and_headers(
    subprotocol: str, headers: list[tuple[bytes, bytes]]
) -> None:
    message = encode_accept(subprotocol, encode_head(headers))
    assert message[0] == ACCEPT
    assert decode_accept(message[1:]) == (subprotocol, headers)

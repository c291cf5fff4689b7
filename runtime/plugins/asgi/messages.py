"""Encodes what a web app and its caller exchange: pieces of responses, and messages of WebSockets.

A piece of a response is `flags u8`, then, with the flag START, `status u16 | head length u32` (little endian) and the head,
then a part of the body. The head has the lines of the headers as HTTP/1.1 has them: any bytes but line breaks and NUL.

A message of a WebSocket is `kind u8` and its data. If TEXT or BYTES are longer than a piece, they are cut into several messages.
All of these except the last have the flag CONTINUES in `kind`. ACCEPT has the subprotocol, a line feed and a head. CLOSE has
`code u16` and the reason. If an app denies a handshake, its response is sent in messages of the kind DENY, which hold pieces of
the response.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ....errors import LinkError, OutputInvalid

START, LAST = 1, 2
ACCEPT, TEXT, BYTES, CLOSE, DENY = 1, 2, 3, 4, 5
CONTINUES = 0x80
# Codes of WebSockets that stand for a missing code, and for a connection that has broken off. They are never sent.
NO_STATUS, ABNORMAL = 1005, 1006
# A piece of an exchange has at most 64 KiB: this much data, and 16 bytes for the flags or the kind.
PART_BYTES = (64 << 10) - 16
MAX_HEAD_BYTES = 48 << 10
_START = struct.Struct("<HI")
_CODE = struct.Struct("<H")
_HEAD = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+: [^\r\n\0]*\r\n)*")
_INVALID = "A header of the response is not valid in HTTP."
_INVALID_REMEDY = "A name has letters, digits and -; a value has no line break and no NUL."
HeaderPair = tuple[bytes, bytes]


class ResponsePiece(NamedTuple):
    """A part of a response. In every piece but the first, `status` is 0 and `head` is empty."""

    status: int
    head: bytes
    body: bytes
    last: bool


def encode_head(headers: Iterable[HeaderPair]) -> bytes:
    """Return headers as lines. Raise OutputInvalid if HTTP does not allow a name or a value, or if the lines are too long together."""
    lines = []
    for name, value in headers:
        # The caller would read only the text before the colon as the name, and the rest as part of the value.
        if b":" in name:
            raise OutputInvalid(_INVALID, remedy=_INVALID_REMEDY)
        lines.append(b"%b: %b\r\n" % (name, value))
    head = b"".join(lines)
    check_head(head)
    if head.count(b"\n") != len(lines):
        # A header contains a line break, so the caller would read two headers.
        raise OutputInvalid(_INVALID, remedy=_INVALID_REMEDY)
    return head


def check_head(head: bytes) -> None:
    """Raise OutputInvalid if lines of headers are not valid. Invalid lines could begin another response."""
    if len(head) > MAX_HEAD_BYTES:
        raise OutputInvalid(f"The headers of the response have more than {MAX_HEAD_BYTES} bytes.")
    if not _HEAD.fullmatch(head):
        raise OutputInvalid(_INVALID, remedy=_INVALID_REMEDY)


def decode_head(head: bytes) -> list[HeaderPair]:
    """Return the headers of valid lines. The names have the case in which they were sent."""
    pairs = (line.partition(b": ") for line in head.split(b"\r\n") if line)
    return [(name, value) for name, _, value in pairs]


def encode_response(body: bytes, *, status: int = 0, head: bytes = b"", last: bool = False) -> bytes:
    """Return a piece of a response. With a `status`, it is the first piece."""
    if not status:
        return (b"\x02" if last else b"\x00") + body
    return b"%b%b%b%b" % (b"\x03" if last else b"\x01", _START.pack(status, len(head)), head, body)


def decode_response(piece: bytes) -> ResponsePiece:
    """Return the parts of a piece. Raise LinkError if it is malformed."""
    flags = piece[0] if piece else -1
    if flags & START and flags > 0:
        if len(piece) < 1 + _START.size:
            raise LinkError("A worker sent a malformed piece of a response.")
        status, size = _START.unpack_from(piece, 1)
        begin = 1 + _START.size
        if begin + size > len(piece) or not 100 <= status <= 999:
            raise LinkError("A worker sent a malformed piece of a response.")
        return ResponsePiece(status, piece[begin : begin + size], piece[begin + size :], bool(flags & LAST))
    if flags < 0:
        raise LinkError("A worker sent an empty piece of a response.")
    return ResponsePiece(0, b"", piece[1:], bool(flags & LAST))


def parts(body: bytes, size: int = PART_BYTES) -> Iterator[bytes]:
    """Yield a body in parts of at most `size` bytes. Yield one empty part for an empty body."""
    yield body[:size] if len(body) > size else body
    for start in range(size, len(body), size):
        yield body[start : start + size]


def encode_accept(subprotocol: str, head: bytes) -> bytes:
    """Return the message with which an app accepts a WebSocket: the subprotocol, a line break, and lines of headers."""
    return b"%c%b\n%b" % (ACCEPT, subprotocol.encode("latin-1"), head)


def decode_accept(data: bytes) -> tuple[str, list[HeaderPair]]:
    """Return (subprotocol, headers) of a message ACCEPT without its kind. Raise OutputInvalid for invalid headers."""
    subprotocol, _, head = data.partition(b"\n")
    check_head(head)
    return subprotocol.decode("latin-1"), decode_head(head)


def encode_message(kind: int, data: bytes) -> list[bytes]:
    """Return the data of a TEXT or BYTES message as one message, or as several messages if it is longer than a piece."""
    found = list(parts(data))
    return [bytes((kind | CONTINUES,)) + part for part in found[:-1]] + [bytes((kind,)) + found[-1]]


def encode_close(code: int, reason: str) -> bytes:
    return bytes((CLOSE,)) + _CODE.pack(code) + reason.encode("utf-8", "replace")[:123]


def decode_close(data: bytes) -> tuple[int, str]:
    """Return (code, reason) of a message CLOSE without its kind. Raise LinkError if it is malformed."""
    if len(data) < _CODE.size:
        raise LinkError("A close message of a WebSocket has no code.")
    return _CODE.unpack_from(data)[0], data[_CODE.size :].decode("utf-8", "ignore")


class MessageParts:
    """Puts the parts of a WebSocket's messages together again, up to a limit."""

    def __init__(self, most: int) -> None:
        self._most, self._parts, self._size = most, list[bytes](), 0

    def add(self, message: bytes) -> tuple[int, bytes] | None:
        """Return (kind, data) of a message, or None if more parts of it follow. Raise LinkError if it is malformed, and
        OutputInvalid if it is too long.
        """
        if not message:
            raise LinkError("A message of a WebSocket is empty.")
        kind = message[0]
        self._size += len(message) - 1
        if self._size > self._most:
            fault = f"A message of the WebSocket has more than {self._most} bytes."
            raise OutputInvalid(fault, remedy="Send it in several messages.")
        if kind & CONTINUES:
            self._parts.append(message[1:])
            return None
        data = b"".join([*self._parts, message[1:]]) if self._parts else message[1:]
        self._parts, self._size = [], 0
        return kind, data

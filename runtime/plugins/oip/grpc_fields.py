"""Reads messages of gRPC.
Counts the fields in a message's bytes first and refuses too many, because protobuf makes an object of each field.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from ....errors import BadInput
from ...front.http.content_coding import unpack
from ...front.http.requests import too_large
from .grpc_messages import CLASSES

MOST_FIELDS = 20_000
MOST_VALUES = 1_000_000
"""The most values in the contents of all inputs. Each is an object while it is converted."""
CODINGS = {0x1F: "gzip", 0x78: "deflate"}
"""The codings by the first byte of a compressed message. No uncompressed message begins with these bytes: 0x1F is not a valid
tag, and 0x78 is the tag of field 15, which no message has.
"""
_CONTENTS = "InferTensorContents"
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_GROUPS = (3, 4)
_WIDTHS = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8}
_UNPACKED = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_MESSAGE)
_MOST_NUMBER_BYTES = 10
# All bytes of a varint but the last are among these bytes.
_GOES_ON = bytes(range(0x80, 0x100))


class _Field(NamedTuple):
    nested: str
    """The message in the field; "" if it has none."""
    width: int
    """The bytes of each value in a packed list; 1 for varints, which have any length; 0 if the field cannot be packed."""


_UNKNOWN = _Field("", 0)
_FIELDS = {
    name: {
        field.number: _Field(
            field.message_type.name if field.message_type is not None else "",
            0 if field.type in _UNPACKED else _WIDTHS.get(field.type, 1),
        )
        for field in kind.DESCRIPTOR.fields
    }
    for name, kind in CLASSES.items()
}


class _Count:
    """Counts the fields in a message's bytes. Raises BadInput if there are too many.

    Raises LookupError or StopIteration if the bytes are not a message.
    """

    def __init__(self, data: bytes, most: int, most_values: int) -> None:
        self._data, self._most, self._most_values = data, most, most_values
        self._fields = self._values = 0

    def read(self, kind: str, at: int, end: int) -> None:
        """Count the fields of the message of type `kind` from `at` to `end`, and the fields of the messages in it."""
        fields, is_contents, data = _FIELDS[kind], kind == _CONTENTS, self._data
        while at < end:
            self._add(1, is_contents)
            # Nearly all numbers are one byte. Read these without a call, because the calls would take half of the time.
            tag, at = (data[at], at + 1) if data[at] < _GOES_ON[0] else self._number(at)
            wire = tag & 7
            if wire == _BYTES:
                size, at = (data[at], at + 1) if data[at] < _GOES_ON[0] else self._number(at)
                nested, width = fields.get(tag >> 3, _UNKNOWN)
                if nested:
                    self.read(nested, at, at + size)
                elif width:
                    self._add(self._packed(at, size, width), is_contents)
                at += size
            elif wire == _VARINT:
                _, at = self._number(at)
            elif wire not in _GROUPS:
                at += {_FIXED_32: 4, _FIXED_64: 8}[wire]

    def _add(self, number: int, is_contents: bool) -> None:
        if not is_contents:
            self._fields += number
            if self._fields > self._most:
                raise BadInput(f"The message has more than {self._most} fields.")
            return
        self._values += number
        if self._values > self._most_values:
            fault = f"The inputs have more than {self._most_values} values in their contents."
            raise BadInput(fault, remedy="Send them in raw_input_contents.")

    def _packed(self, at: int, size: int, width: int) -> int:
        """Return the number of values in a packed list."""
        return (
            size // width if width > 1 else len(self._data[at : at + size].translate(None, delete=_GOES_ON))
        )

    def _number(self, at: int) -> tuple[int, int]:
        """Return the varint at a position, and the position after it."""
        part = self._data[at : at + _MOST_NUMBER_BYTES]
        size = next(number for number, byte in enumerate(part, 1) if byte < _GOES_ON[0])
        return sum((byte & 0x7F) << 7 * number for number, byte in enumerate(part[:size])), at + size


def check(kind: str, data: bytes, most: int = MOST_FIELDS, most_values: int = MOST_VALUES) -> None:
    """Raise BadInput if `data` is not a message of this kind, has more than `most` fields, or has more than `most_values`
    values in contents.
    """
    try:
        _Count(data, most, most_values).read(kind, 0, len(data))
    except (LookupError, StopIteration):
        raise _malformed(kind) from None


def is_small(kind: str, data: bytes, most: int) -> bool:
    """Return True if a message is valid and not compressed, and has at most `most` fields and `most` values in contents."""
    if data and data[0] in CODINGS:
        return False
    try:
        check(kind, data, most, most)
    except BadInput:
        return False
    return True


def read_message(kind: str, data: bytes) -> Any:
    """Return the message in bytes that `check` has accepted. Raise BadInput if protobuf refuses them."""
    try:
        return CLASSES[kind].FromString(data)
    except DecodeError:
        raise _malformed(kind) from None


def unpacked(sent: bytes, most: int) -> bytes:
    """Return a message without its compression. Raise InputTooLarge if it has more than `most` bytes."""
    coding = CODINGS.get(sent[0]) if sent else None
    data = sent if coding is None else unpack(sent, coding, most)
    if len(data) > most:
        raise too_large(most)
    return data


def _malformed(kind: str) -> BadInput:
    return BadInput(f"The message is no {kind}.")

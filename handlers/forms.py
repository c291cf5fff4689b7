"""Parses forms of the type multipart/form-data (RFC 7578) as they arrive, in a time that is linear in their size."""

from __future__ import annotations

from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from email.utils import collapse_rfc2231_value
from typing import NamedTuple

from ..errors import BadInput

MAX_FIELDS, MAX_HEAD_BYTES, MAX_PARAMETERS = 1000, 2048, 32
"""The most fields of a form, and the most bytes and parameters of the headers of a field."""
_HEAD_END = b"\r\n\r\n"


class FormField(NamedTuple):
    """The headers of a field. `file` is "" without a file name, and `content_type` is "" without the header Content-Type."""

    name: str
    file: str
    content_type: str


class FormParser:
    """The parser of a form, which gets the form in pieces."""

    def __init__(self, content_type: str, most_fields: int = MAX_FIELDS) -> None:
        """Raise BadInput if the content type has no boundary."""
        header = Message()
        header["Content-Type"] = content_type
        boundary = header.get_boundary("").encode(errors="surrogateescape")
        if not boundary:
            raise _malformed()
        self._delimiter = b"\r\n--" + boundary
        # The delimiter begins with a line break, which may be missing before the first boundary.
        self._left = b"\r\n"
        self._fields, self._most_fields = 0, most_fields
        self._in_head = self._complete = False

    def feed(self, piece: bytes) -> Iterator[FormField | bytes]:
        """Yield each field, and after it its content in pieces. Raise BadInput if the form is malformed or has too many fields."""
        left, at = self._left + piece, 0
        while not self._complete:
            if self._in_head:
                # The boundary after the last field ends with two more dashes.
                self._complete = left.startswith(b"--", at)
                if self._complete or (end := self._head_end(left, at)) < 0:
                    break
                yield self._field(left[at:end])
                at, self._in_head = end + len(_HEAD_END), False
            else:
                end = left.find(self._delimiter, at)
                # Keep the last bytes, which may be the beginning of a boundary.
                stop = end if end >= 0 else max(at, len(left) - len(self._delimiter) + 1)
                if self._fields and stop > at:
                    yield left[at:stop]
                at = stop
                if end < 0:
                    break
                at, self._in_head = end + len(self._delimiter), True
        self._left = b"" if self._complete else left[at:]

    def end(self) -> None:
        """Raise BadInput if the form is not complete."""
        if not self._complete:
            raise _malformed()

    def _head_end(self, left: bytes, at: int) -> int:
        """Return the end of the headers that begin at `at`; -1 if it has not arrived. Raise BadInput if they are too long."""
        end = left.find(_HEAD_END, at, at + MAX_HEAD_BYTES)
        if end < 0 and len(left) - at >= MAX_HEAD_BYTES:
            raise _malformed()
        return end

    def _field(self, head: bytes) -> FormField:
        """Return a field. `head` has the rest of the boundary's line, and then the field's headers. Raise BadInput."""
        self._fields += 1
        if self._fields > self._most_fields:
            raise too_many_fields(self._most_fields)
        blank, _, lines = head.partition(b"\r\n")
        if blank.strip(b" \t") or self._delimiter in head or lines.count(b";") > MAX_PARAMETERS:
            raise _malformed()
        headers = HeaderParser().parsestr(lines.decode(errors="replace"))
        # If several parameters have the same name, use the first one.
        given = {key.lower(): value for key, value in reversed(headers.get_params([], "Content-Disposition"))}
        name, file = (collapse_rfc2231_value(given.get(key, "")) for key in ("name", "filename"))
        return FormField(name, file, headers.get_content_type() if headers["Content-Type"] else "")


def too_many_fields(most: int = MAX_FIELDS) -> BadInput:
    return BadInput(f"The form has more than {most} fields.", remedy="Send fewer, or send JSON.")


def _malformed() -> BadInput:
    return BadInput("The form is malformed.", remedy="Send multipart/form-data with its boundary.")

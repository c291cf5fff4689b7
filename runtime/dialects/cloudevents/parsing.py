"""CloudEvents 1.0 over HTTP: the events of a request in binary, structured or batched mode, checked. Pure."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from ....errors import EventInvalid, InputTooLarge, UnsupportedMedia
from ....handlers.codec import BYTES_TYPE, JSON_TYPE

STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
PREFIX = "ce-"
REQUIRED = ("specversion", "id", "source", "type")
VERSION = "1.0"
MAX_EVENTS = 1000
MAX_ATTRIBUTES = 100
MAX_CONTEXT_BYTES = 64 << 10
"""All attributes of one event: as much as the specification asks everybody to take."""

_OURS = "application/cloudevents"
_NAME = re.compile(r"[a-z0-9]{1,64}")
# Control characters, halves of surrogate pairs, and what Unicode calls no characters: not in an attribute's string.
_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
_REFERENCE = re.compile(r"[^\s<>\"{}|\\^`]+")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]+")
_MEDIA = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]*(;[\x20-\x7e\t]*)?")
_TIME = re.compile(
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[Tt]([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?"
    r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_FORMS = {
    "source": (_REFERENCE, "a URI or a relative one"),
    "dataschema": (_URI, "an absolute URI"),
    "datacontenttype": (_MEDIA, "a media type"),
    "time": (_TIME, "a time as 2026-01-31T12:00:00Z"),
}
_INTEGERS = range(-(1 << 31), 1 << 31)
_QUOTED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """One event. `data` is a handler's body, `content_type` its type ("" is JSON)."""

    attributes: Mapping[str, str | int | bool]
    data: bytes
    content_type: str = ""

    @property
    def idempotency(self) -> str:
        """Source and id: who sends the same again sends the same event."""
        return f"ce:{self.attributes['source']}\n{self.attributes['id']}"


def parse(headers: Mapping[str, str], body: bytes) -> list[ReceivedEvent] | None:
    """The events of a request; None if it is no ReceivedEvent. EventInvalid, UnsupportedMedia, InputTooLarge."""
    given = [(name.lower(), value) for name, value in headers.items()]
    content_type = next((value for name, value in given if name == "content-type"), "")
    media = media_type(content_type)
    if media.startswith(_OURS):
        return _formatted(media, content_type, body)
    if any(name in ("ce-specversion", "ce-type") for name, _ in given):
        return [_binary(given, content_type, body)]
    return None


def media_type(content_type: str) -> str:
    """Without parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def _formatted(media: str, content_type: str, body: bytes) -> list[ReceivedEvent]:
    if media not in (STRUCTURED, BATCHED):
        raise UnsupportedMedia(
            f"CloudEvents as {media!r} are not taken here.", remedy=f"Send {STRUCTURED} or {BATCHED}."
        )
    charset = re.search(r";\s*charset\s*=\s*\"?([^\s;\"]*)", content_type, re.IGNORECASE)
    if charset is not None and charset[1].lower() not in ("utf-8", "us-ascii"):
        raise UnsupportedMedia(
            f"The events are said to be in {charset[1][:40]!r}.", remedy="JSON is sent as UTF-8."
        )
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise EventInvalid(f"The body is not JSON: {error}.", remedy=f"{media} is JSON.") from None
    if media == STRUCTURED:
        return [_structured(found)]
    if not isinstance(found, list):
        raise EventInvalid("The body is not a list of events.", remedy=f"{BATCHED} is a JSON array.")
    if len(found) > MAX_EVENTS:
        raise InputTooLarge(f"There are {len(found)} events.", remedy=f"Send at most {MAX_EVENTS} at a time.")
    return [_structured(one, f"event {number}: ") for number, one in enumerate(found)]


# -- the binary mode: attributes in headers, the data as the body


def _binary(given: list[tuple[str, str]], content_type: str, body: bytes) -> ReceivedEvent:
    attributes: dict[str, Any] = {}
    for header, value in given:
        if header.startswith(PREFIX):
            name = header.removeprefix(PREFIX)
            if name in attributes:
                raise EventInvalid(f"The header {header} was sent twice.", remedy="Send each attribute once.")
            if name in ("data", "datacontenttype"):
                raise EventInvalid(f"{header} is no attribute.", remedy="Use the body and Content-Type.")
            attributes[name] = _decoded(header, value)
    if content_type:
        attributes["datacontenttype"] = content_type
    checked, kind = _checked(attributes, ""), _kind(content_type)
    return ReceivedEvent(checked, body if kind else _normal(body, ""), kind)


def _decoded(header: str, value: str) -> str:
    """A header's value: unquoted if it is quoted, then percent-decoded."""
    value = value.strip(" \t")
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = _QUOTED.sub(r"\1", value[1:-1])
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise EventInvalid(
            f"{header} holds percent-encoded bytes that are not UTF-8.", remedy="Encode UTF-8."
        ) from None


# -- the structured mode: one JSON object has it all


def _structured(found: Any, where: str = "") -> ReceivedEvent:
    if not isinstance(found, dict):
        raise EventInvalid(f"{where}It is not a JSON object.", remedy="An event is an object of attributes.")
    fields = {name: value for name, value in found.items() if name not in ("data", "data_base64")}
    attributes = _checked({name: value for name, value in fields.items() if value is not None}, where)
    content_type = str(attributes.get("datacontenttype", ""))
    if found.get("data_base64") is not None:
        if "data" in found:
            raise EventInvalid(f"{where}It has both data and data_base64.", remedy="Send one of them.")
        data, kind = _bytes(found["data_base64"], where), _kind(content_type or BYTES_TYPE)
        return ReceivedEvent(attributes, data if kind else _normal(data, where), kind)
    if "data" not in found:
        return ReceivedEvent(attributes, b"", _kind(content_type))
    data, kind = found["data"], _kind(content_type)
    if kind and isinstance(data, str):
        return ReceivedEvent(attributes, data.encode(), kind)
    # What is no text was sent as JSON, whatever it is called.
    return ReceivedEvent(attributes, _dumped(data, where))


def _bytes(data: Any, where: str) -> bytes:
    try:
        if isinstance(data, str):
            return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise EventInvalid(f"{where}data_base64 is not Base64.", remedy="Encode it, with padding.")


# -- both


def _normal(data: bytes, where: str) -> bytes:
    """JSON as we write it: an event may come again in another mode, and is the same. None stays none."""
    try:
        return _dumped(orjson.loads(data), where) if data else b""
    except orjson.JSONDecodeError as error:
        raise EventInvalid(
            f"{where}The data is not JSON: {error}.",
            remedy="Say in Content-Type, or datacontenttype, what it is.",
        ) from None


def _dumped(data: Any, where: str) -> bytes:
    try:
        return orjson.dumps(data)
    except orjson.JSONEncodeError as error:  # it reads deeper than it writes
        raise EventInvalid(
            f"{where}The data cannot be taken: {error}.", remedy="Nest it less deeply."
        ) from None


def _kind(content_type: str) -> str:
    """The type of a handler's body: "" for any JSON."""
    media = media_type(content_type)
    return "" if media in ("", JSON_TYPE, "text/json") or media.endswith("+json") else content_type


def _checked(attributes: dict[str, Any], where: str) -> dict[str, Any]:
    for name in REQUIRED:
        if name not in attributes:
            raise EventInvalid(
                f"{where}The attribute {name!r} is missing.", remedy=f"Required: {', '.join(REQUIRED)}."
            )
    if attributes["specversion"] != VERSION:
        raise EventInvalid(
            f"{where}specversion is {str(attributes['specversion'])[:20]!r}.",
            remedy=f"It must be {VERSION!r}.",
        )
    if len(attributes) > MAX_ATTRIBUTES:
        raise InputTooLarge(
            f"{where}It has {len(attributes)} attributes.", remedy=f"At most {MAX_ATTRIBUTES}."
        )
    size = 0
    for name, value in attributes.items():
        _check_attribute(name, value, where)
        size += len(name) + len(str(value).encode())
    if size > MAX_CONTEXT_BYTES:
        raise InputTooLarge(
            f"{where}Its attributes have {size} bytes.",
            remedy=f"At most {MAX_CONTEXT_BYTES}: move some into data.",
        )
    return attributes


def _check_attribute(name: str, value: Any, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise EventInvalid(
            f"{where}{name[:64]!r} is no attribute's name.", remedy="Names are 1 to 64 of a-z and 0-9."
        )
    known = name in REQUIRED or name in _FORMS or name == "subject"
    if not known and (isinstance(value, bool) or (isinstance(value, int) and value in _INTEGERS)):
        return
    if not isinstance(value, str) or _FORBIDDEN.search(value) or (known and not value):
        wanted = "text that is not empty" if known else "text, true, false or a 32-bit integer"
        raise EventInvalid(
            f"{where}The attribute {name!r} cannot be taken.",
            remedy=f"It must be {wanted}, without control characters.",
        )
    form, wanted = _FORMS.get(name, (None, ""))
    if form is not None and not form.fullmatch(value):
        raise EventInvalid(f"{where}{name} is {value[:80]!r}.", remedy=f"It must be {wanted}.")

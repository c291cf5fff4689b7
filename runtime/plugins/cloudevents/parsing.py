"""Parses CloudEvents 1.0 from HTTP requests in binary, structured and batched mode. It does no I/O."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import unquote

import orjson
from aiohttp import hdrs
from multidict import istr
from pydantic import AfterValidator, BaseModel, Field, ValidationError

from ....errors import BadInput, EventInvalid, InputTooLarge, UnsupportedMedia
from ....foreign_json import dumps
from ....handlers.codec import BYTES_TYPE, JSON_TYPE
from ...front.http.requests import Headers, load_json, media_type_of, problems

FAMILY = "application/cloudevents"
STRUCTURED = "application/cloudevents+json"
BATCHED = "application/cloudevents-batch+json"
PREFIX = "ce-"
DATA = ("data", "data_base64")
MAX_EVENTS = 1000
MAX_ATTRIBUTES = 100
MAX_CONTEXT_BYTES = 64 << 10
"""The limit for an event's attributes, names and values: the size up to which intermediaries must forward an event."""
_MOST_REMEDY = f"Send at most {MAX_ATTRIBUTES}, with {MAX_CONTEXT_BYTES} bytes; move some into data."

_SPECVERSION, _TYPE = istr("ce-specversion"), istr("ce-type")
_NAME = re.compile(r"[a-z0-9]{1,64}")
# The specification forbids control characters, surrogates and noncharacters in attributes.
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]*")
_REFERENCE = re.compile(r"[^\s<>\"{}|\\^`]+")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[^\s<>\"{}|\\^`]+")
_MEDIA = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+/[!#$%&'*+.^_`|~0-9A-Za-z-]+[ \t]*(;[\x20-\x7e\t]*)?")
_TIME = re.compile(
    r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])[Tt]([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?"
    r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)",
    re.ASCII,
)
_QUOTED = re.compile(r"\\(.)")
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)


def _matching(pattern: re.Pattern[str], wanted: str) -> AfterValidator:
    def check(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"it must be {wanted}")
        return value

    return AfterValidator(check)


_Printable = Annotated[str, _matching(_TEXT, "text without control characters")]
_Text = Annotated[_Printable, Field(min_length=1)]
_Extension = bool | Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | _Printable


class CloudEvent(BaseModel, extra="allow", strict=True):
    """An event in structured mode. Any other attribute is an extension: text, a boolean or a 32-bit integer."""

    __pydantic_extra__: dict[str, _Extension]

    specversion: Literal["1.0"]
    id: _Text
    source: Annotated[_Text, _matching(_REFERENCE, "a URI or a relative reference")]
    type: _Text
    subject: _Text | None = None
    time: Annotated[_Text, _matching(_TIME, "a time such as 2026-01-31T12:00:00Z")] | None = None
    dataschema: Annotated[_Text, _matching(_URI, "an absolute URI")] | None = None
    datacontenttype: Annotated[_Text, _matching(_MEDIA, "a media type")] | None = None
    data: Any = None
    data_base64: str | None = None


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    """A parsed event. `data` is the handler's input, and `content_type` its media type; "" means JSON."""

    attributes: Mapping[str, str | int | bool]
    data: bytes
    content_type: str = ""

    @property
    def idempotency(self) -> str:
        """The idempotency key: events with the same source and id are the same event."""
        return f"ce:{self.attributes['source']}\n{self.attributes['id']}"


def is_event(headers: Headers) -> bool:
    """Return True if a request with these headers carries events, in any of the three modes."""
    if _SPECVERSION in headers or _TYPE in headers:
        return True
    kind = headers.get(hdrs.CONTENT_TYPE)
    # This runs for each plain request to /invoke. So compare with the usual type first, which is the cheapest test.
    return kind is not None and kind != JSON_TYPE and kind.lstrip().lower().startswith(FAMILY)


def parse(headers: Headers, body: bytes) -> list[ReceivedEvent]:
    """Return the events of a request. Raise EventInvalid if an event is malformed.

    Raise UnsupportedMedia if the format or the charset of the events is not supported. Raise InputTooLarge if there
    are too many events or attributes.
    """
    media = media_type_of(headers)
    if not media.startswith(FAMILY):
        return [_binary(headers, body)]
    if media not in (STRUCTURED, BATCHED):
        remedy = f"Send {STRUCTURED} or {BATCHED}."
        raise UnsupportedMedia(f"CloudEvents as {media!r} are not supported.", remedy=remedy)
    charset = _CHARSET.search(headers[hdrs.CONTENT_TYPE])
    if charset is not None and charset[1].lower() not in ("utf-8", "us-ascii"):
        raise UnsupportedMedia(f"The charset is {charset[1][:40]!r}.", remedy="Send JSON as UTF-8.")
    try:
        found = load_json(body)
    except BadInput as error:
        raise EventInvalid(error.message, remedy=f"{media} is JSON.") from None
    if media == STRUCTURED:
        return [structured_event(found)]
    if not isinstance(found, list):
        raise EventInvalid("The body is not a list of events.", remedy=f"{BATCHED} is a JSON array.")
    if len(found) > MAX_EVENTS:
        raise InputTooLarge(f"There are {len(found)} events.", remedy=f"Send at most {MAX_EVENTS} at a time.")
    return [structured_event(one, f"event {number}: ") for number, one in enumerate(found)]


def _binary(headers: Headers, body: bytes) -> ReceivedEvent:
    """Return the event of a request in binary mode, whose headers hold the attributes and whose body holds the data."""
    attributes: dict[str, Any] = {}
    for header, value in headers.items():
        prefix, name = header[: len(PREFIX)].lower(), header[len(PREFIX) :].lower()
        if prefix == PREFIX:
            if name in attributes:
                raise EventInvalid(f"The header {header} was sent twice.", remedy="Send each attribute once.")
            if name in ("data", "datacontenttype"):
                raise EventInvalid(f"{header} is not an attribute.", remedy="Use the body and Content-Type.")
            attributes[name] = _decode(header, value)
    if content_type := headers.get(hdrs.CONTENT_TYPE, ""):
        attributes["datacontenttype"] = content_type
    checked, kind = _check(attributes, ""), _kind(content_type)
    return ReceivedEvent(checked, body if kind else _normalize(body, ""), kind)


def _decode(header: str, value: str) -> str:
    """Return a header's value without quotes and percent-encoding. Raise EventInvalid if it is not UTF-8."""
    value = value.strip(" \t")
    if len(value) >= 2 and value[0] == value[-1] == '"':
        value = _QUOTED.sub(r"\1", value[1:-1])
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        raise EventInvalid(f"{header} is percent-encoded, but not UTF-8.", remedy="Encode UTF-8.") from None


def structured_event(found: Any, where: str = "") -> ReceivedEvent:
    """Return the event in a JSON object. Error messages begin with `where`, which names the event of a batch."""
    if not isinstance(found, dict):
        raise EventInvalid(f"{where}The event is not a JSON object.", remedy="Send an object of attributes.")
    sent = {name: value for name, value in found.items() if value is not None and name not in DATA}
    attributes = _check(sent, where)
    content_type = str(attributes.get("datacontenttype", ""))
    if found.get("data_base64") is not None:
        if "data" in found:
            raise EventInvalid(f"{where}The event has both data and data_base64.", remedy="Send one of them.")
        data, kind = _decode_base64(found["data_base64"], where), _kind(content_type or BYTES_TYPE)
        return ReceivedEvent(attributes, data if kind else _normalize(data, where), kind)
    if "data" not in found:
        return ReceivedEvent(attributes, b"", _kind(content_type))
    data, kind = found["data"], _kind(content_type)
    if kind and isinstance(data, str):
        return ReceivedEvent(attributes, data.encode(), kind)
    # Data of a JSON type is passed on as JSON. Data that is not a string is also passed on as JSON, whatever its type.
    return ReceivedEvent(attributes, _dump(data, where))


def _decode_base64(data: Any, where: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except (TypeError, ValueError):
        raise EventInvalid(f"{where}data_base64 is not Base64.", remedy="Encode it with padding.") from None


def _normalize(data: bytes, where: str) -> bytes:
    """Return JSON data as orjson writes it; empty data stays empty. Raise EventInvalid if the data is not JSON.

    A sender may repeat an event in another mode. The repeated event belongs to the same job, so both must have the
    same bytes.
    """
    try:
        return _dump(load_json(data), where) if data else b""
    except BadInput as error:
        remedy = "Name its type in Content-Type or datacontenttype."
        raise EventInvalid(f"{where}{error.message}", remedy=remedy) from None


def _dump(data: Any, where: str) -> bytes:
    try:
        return dumps(data)
    # orjson can parse data that is nested too deeply for it to write.
    except orjson.JSONEncodeError as error:
        remedy = "Nest it less deeply."
        raise EventInvalid(f"{where}The data cannot be stored: {error}.", remedy=remedy) from None


def _kind(content_type: str) -> str:
    """Return the media type of the handler's input: `content_type`, or "" if `content_type` is empty or JSON."""
    media = content_type.partition(";")[0].strip().lower()
    return "" if media in ("", JSON_TYPE, "text/json") or media.endswith("+json") else content_type


def _check(attributes: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `attributes` unchanged. Raise EventInvalid if one is wrong, InputTooLarge if they exceed a limit."""
    if len(attributes) > MAX_ATTRIBUTES:
        raise InputTooLarge(f"{where}The event has {len(attributes)} attributes.", remedy=_MOST_REMEDY)
    try:
        CloudEvent.model_validate(attributes)
    except ValidationError as error:
        field, problem = problems(error)[0]
        message = f"{where}The attribute {field.partition('.')[0][:64]!r} is invalid: {problem}."
        raise EventInvalid(message, remedy="Send the attributes of CloudEvents 1.0.") from None
    if wrong := next((name for name in attributes if not _NAME.fullmatch(name)), None):
        remedy = "Use 1 to 64 of a-z and 0-9."
        raise EventInvalid(f"{where}{wrong[:64]!r} is not the name of an attribute.", remedy=remedy)
    size = sum(len(name) + len(str(value).encode()) for name, value in attributes.items())
    if size > MAX_CONTEXT_BYTES:
        raise InputTooLarge(f"{where}The event's attributes have {size} bytes.", remedy=_MOST_REMEDY)
    return attributes

"""Intake: what of a request is read before anything is done with it, within limits of size and time."""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import orjson
from aiohttp import hdrs, web
from multidict import istr

from ...errors import BadInput, InputTimeout, InputTooLarge
from ...handlers.arrays import NPY_TYPE, SAFETENSORS_TYPE
from ...handlers.codec import BYTES_TYPE, JSON_TYPE
from ..telemetry.timeline import TRACEPARENT

_ID_BYTES = 8
_IDS_AT_ONCE = 256
REQUEST_ID_HEADER = istr("X-Request-Id")
TRACEPARENT_HEADER = istr("traceparent")
IDEMPOTENCY = "Idempotency-Key"
MAX_KEY_CHARS = 255
MAX_ACCEPT_CHARS = 1000
ARRAY_TYPES = (NPY_TYPE, BYTES_TYPE, SAFETENSORS_TYPE)
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Limits(NamedTuple):
    """Of every function's bodies: how large, and how long they may take to arrive."""

    max_body_bytes: int
    body_timeout_s: float


async def read_body(request: web.Request, limit: int, timeout_s: float) -> bytes:
    """The whole body. InputTooLarge, as soon as it is over `limit` bytes; InputTimeout; BadInput if it breaks off."""
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    if not request.can_read_body:
        return b""
    try:
        if request.content.is_eof():  # as with most requests, all of it came with the header
            return _within(request.content.read_nowait(), limit)
        async with asyncio.timeout(timeout_s):
            return await _collect(request, limit)
    except TimeoutError:
        raise InputTimeout(
            f"The body did not arrive within {timeout_s:.0f} s.", remedy="Send it faster, or less of it."
        ) from None
    except web.RequestPayloadError as error:
        raise BadInput(f"The body broke off or is malformed: {error}.") from None


def dump_json(value: Any) -> bytes:
    """JSON of what was read from JSON. BadInput: more can be read than written."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise BadInput(f"The body cannot be taken: {error}.", remedy="Nest it less deeply.") from None


def seconds(headers: Mapping[str, str], name: str, default: float, most: float) -> float:
    """A header that holds a number of seconds; `most` at most. BadInput if it is none."""
    text = headers.get(name)
    if text is None:
        return default
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise BadInput(f"The header {name} is {text!r}.", remedy="It must be a positive number of seconds.")
    return min(found, most)


def _made() -> Iterator[str]:
    """New ids, as hard to guess as any; asking the kernel for each costs more than the rest of it."""
    while True:
        many = secrets.token_hex(_ID_BYTES * _IDS_AT_ONCE)
        for start in range(0, len(many), 2 * _ID_BYTES):
            yield many[start : start + 2 * _ID_BYTES]


_ids = _made()


def request_id_of(headers: Mapping[str, str]) -> str:
    """The caller's id if it is a sane one, else a new one."""
    given = headers.get(REQUEST_ID_HEADER)
    return given if given is not None and REQUEST_ID.fullmatch(given) else next(_ids)


def traceparent_of(headers: Mapping[str, str]) -> str:
    """The caller's trace context, if it is one."""
    given = headers.get(TRACEPARENT_HEADER, "")
    return given if TRACEPARENT.fullmatch(given) else ""


def idempotency_of(headers: Mapping[str, str]) -> str:
    """What a job is found again by whose caller sent a key; "" if he sent none. BadInput if it is too long."""
    key = headers.get(IDEMPOTENCY, "")
    if len(key) > MAX_KEY_CHARS:
        raise BadInput(
            f"The header {IDEMPOTENCY} has {len(key)} characters.", remedy=f"At most {MAX_KEY_CHARS}."
        )
    return f"key:{key}" if key else ""


def media_type_of(headers: Mapping[str, str]) -> str:
    """The body's media type as it was sent, without parameters; "" if it was not sent."""
    return headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()


def content_type_of(headers: Mapping[str, str]) -> str:
    """The body's media type, "" for JSON. BadInput if it cannot be one."""
    found = headers.get(hdrs.CONTENT_TYPE, "")
    if not found.isascii():
        raise BadInput("The Content-Type is not ASCII.", remedy="Send a media type, as application/json.")
    return "" if found == JSON_TYPE else found


def accept_of(headers: Mapping[str, str]) -> str:
    """What the worker is to know of Accept: all of it where the caller takes arrays as bytes, else nothing."""
    accept = headers.get(hdrs.ACCEPT)
    if accept is None:
        return ""
    if len(accept) > MAX_ACCEPT_CHARS or not accept.isascii():
        return ""
    lower = accept.lower()
    return lower if any(kind in lower for kind in ARRAY_TYPES) else ""


def too_large(limit: int) -> InputTooLarge:
    return InputTooLarge(
        f"The body is larger than {limit} bytes.",
        remedy="Send a reference (an object's address) instead, or raise max_body_bytes in pilotflame.toml.",
    )


def _within(body: bytes, limit: int) -> bytes:
    if len(body) > limit:
        raise too_large(limit)
    return body


async def _collect(request: web.Request, limit: int) -> bytes:
    """The whole body; stops reading as soon as it is over the limit, however it is encoded."""
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
    return b"".join(parts)

"""Reads requests: bodies, within limits of size and time, and headers such as type, deadline and priority."""

from __future__ import annotations

import asyncio
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import orjson
from aiohttp import HttpVersion11, hdrs, web
from multidict import istr
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator

from ....errors import BadInput, InputTimeout, InputTooLarge, OutputInvalid, PilotflameError
from ....foreign_json import check_json, dumps, excess, failing_fast, first_errors, loads
from ....handlers.arrays import NPY_TYPE, SAFETENSORS_TYPE, TENSORS_TYPE
from ....handlers.caller import NORMAL
from ....handlers.codec import BYTES_TYPE, JSON_TYPE
from ...ground.access.keys import ALL, ANYBODY, Caller
from ...ground.telemetry.random_ids import RandomIds
from ...ground.telemetry.refusals import explaining
from ...ground.telemetry.timeline import TRACEPARENT
from .content_coding import CODINGS, unpack
from .incoming_bodies import INCOMING

CALLER = web.RequestKey("caller", Caller)
BODY = web.RequestKey("body", bytes)
"""The body of a request that the guard had to read, as it was sent. `read_body` unpacks and returns it."""
BODY_BYTES = web.RequestKey("body_bytes", int)
"""The size of the body that `read_body` has returned."""
CALLS = web.RequestKey("calls", bool)
"""Plugins set this for a request that waits for an invocation, if its path is not a path of `invoke`."""
CONTINUED = web.RequestKey("continued", bool)
"""True once the gateway has sent the interim response 100, for which a client may wait before it sends the body."""
ID = web.RequestKey("id", str)
Headers: TypeAlias = Mapping[str, str]
M = TypeVar("M", bound=BaseModel)
MAX_JOINED_BYTES = 1 << 20
"""The event loop copies at most this many bytes of a body: copying 20 MB takes 50 ms on a machine with slow memory."""
T = TypeVar("T")

# With names of type `istr`, multidict does not have to convert the case of the name at each lookup.
REQUEST_ID_HEADER = istr("X-Request-Id")
TRACEPARENT_HEADER = istr("traceparent")
TRACESTATE_HEADER = istr("tracestate")
TIMEOUT = istr("X-Request-Timeout")
HOLD = istr("X-Scale-Up-Timeout")
MAX_HOLD_S = 3600.0
PRIORITY = istr("X-Priority")
GRPC = istr("grpc-timeout")
ENVOY = istr("x-envoy-expected-rq-timeout-ms")
STAINLESS = istr("x-stainless-read-timeout")
CONTINUE = "100-continue"
IDEMPOTENCY = "Idempotency-Key"
MAX_KEY_CHARS = 255
MAX_ACCEPT_CHARS = 1000
MAX_PREFERENCES = 32
MAX_PROBLEMS = 20
ARRAY_TYPES = (NPY_TYPE, BYTES_TYPE, SAFETENSORS_TYPE)
TOO_LARGE_REMEDY = "Send the address of an object instead, or raise max_body_bytes in pilotflame.toml."
GATEWAY_REMEDY = (
    "Put the data where the function can fetch it and send its address, or raise PILOTFLAME_MAX_BODY_BYTES of the gateway and"
    " max_body_bytes in pilotflame.toml."
)
# A body of 20 MiB, the default of max_body_bytes, needs 6 Mbit/s to arrive in this time. With a longer limit, slow
# callers would use memory for longer.
BODY_TIMEOUT_S = 30.0
STORED_REMEDY = "Put the data where the function can fetch it and send its address, or call and wait: a job's body is stored."
TRACESTATE = re.compile(r"[\x20-\x7e]{0,512}")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_IDS = RandomIds(8)
_GRPC = re.compile(r"([0-9]{1,8})([HMSmun])")
_GRPC_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
_PRIORITIES = {str(number): number for number in range(1, 6)}


def caller_of(request: web.Request) -> Caller:
    """Return the caller that the guard has set. On public routes, the guard sets none, and this returns ANYBODY."""
    found: Caller = request.get(CALLER, ANYBODY)
    return found


def owner_of(request: web.Request) -> str:
    """Return the owner whose jobs the caller may see and change; ALL for administrators."""
    caller = caller_of(request)
    return ALL if caller.administers else caller.owner


async def read_body(
    request: web.Request, limit: int, timeout_s: float | None = None, *, remedy: str = TOO_LARGE_REMEDY
) -> bytes:
    """Return the unpacked body. Raise InputTooLarge, with `remedy`, as soon as the body exceeds `limit` bytes, packed
    or unpacked, and the errors of `read_sent` and `unpack`.
    """
    body = await read_sent(request, limit, timeout_s, remedy=remedy)
    coding = coding_of(request.headers)
    request[BODY_BYTES] = len(body)
    if coding not in CODINGS:
        return body
    work = functools.partial(unpack, coding=coding, limit=limit)
    with explaining(named=False):
        body = await request.app[INCOMING].unpack(caller_of(request).owner, body, work)
    if len(body) > limit:
        raise too_large(limit, remedy)
    request[BODY_BYTES] = len(body)
    return body


async def in_turn(request: web.Request, work: Callable[[], T]) -> T:
    """Run `work` in a thread once it is the turn of the request's caller, and return its result."""
    return await request.app[INCOMING].in_turn(caller_of(request).owner, work)


def coding_of(headers: Headers) -> str:
    """Return the Content-Encoding in lower case, or "" without the header."""
    return headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()


async def read_sent(
    request: web.Request, limit: int, timeout_s: float | None = None, *, remedy: str = TOO_LARGE_REMEDY
) -> bytes:
    """Return the body as it was sent. Raise InputTooLarge, with `remedy`, as soon as it exceeds `limit` bytes.

    Raise InputTimeout if the body takes longer than `timeout_s`, by default `BODY_TIMEOUT_S`, BadInput if the body ends early or is malformed, and
    Overloaded if too many bytes of unfinished bodies have arrived (`IncomingBodies`).
    """
    timeout_s = BODY_TIMEOUT_S if timeout_s is None else timeout_s
    read: bytes | None = request.get(BODY)
    if (request.content_length or 0) > limit or len(read or b"") > limit:
        raise too_large(limit, remedy)
    if read is not None:
        return read
    if not request.can_read_body:
        return b""
    await continue_body(request)
    try:
        # Most bodies arrive together with the header.
        if request.content.is_eof():
            body = request.content.read_nowait()
        else:
            # No function has run yet. So if the operating system refuses something here, the error invites a retry.
            with explaining(named=False):
                async with asyncio.timeout(timeout_s):
                    body = await _collect(request, limit, remedy)
    except TimeoutError:
        raise InputTimeout(f"The body took longer than {timeout_s:.0f} s.", remedy="Send less.") from None
    except web.RequestPayloadError as error:
        raise BadInput(f"The body broke off or is malformed: {error}.") from None
    if len(body) > limit:
        raise too_large(limit, remedy)
    return body


async def check_expectation(request: web.Request) -> None:
    """Raise HTTPExpectationFailed unless the client expects nothing but 100-continue, which `continue_body` sends."""
    if request.version == HttpVersion11 and request.headers.get(hdrs.EXPECT, "").lower() != CONTINUE:
        raise web.HTTPExpectationFailed


async def continue_body(request: web.Request) -> None:
    """If a client waits before it sends the body (`Expect: 100-continue`), tell the client to send the body. Call this
    before the body is read.

    A request that is refused before this call gets its error at once, and the client does not send the body.
    """
    if awaits_continue(request):
        request[CONTINUED] = True
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # The writer must not count these bytes as part of the response.
        request.writer.output_size = 0


def awaits_continue(request: web.Request) -> bool:
    return request.version == HttpVersion11 and hdrs.EXPECT in request.headers and CONTINUED not in request


async def _collect(request: web.Request, limit: int, remedy: str) -> bytes:
    """Return the body. Raise InputTooLarge, with `remedy`, as soon as it exceeds `limit` bytes."""
    parts, size = [], 0
    incoming, owner = request.app[INCOMING], caller_of(request).owner
    try:
        async for part in request.content.iter_any():
            incoming.add(owner, len(part))
            parts.append(part)
            size += len(part)
            if size > limit:
                raise too_large(limit, remedy)
        if size <= MAX_JOINED_BYTES:
            return b"".join(parts)
        # Join a large body in a thread: `join` releases the interpreter's lock while it copies a large body.
        return await incoming.in_turn(owner, functools.partial(b"".join, parts))
    finally:
        incoming.remove(owner, size)


def too_large(limit: int, remedy: str = TOO_LARGE_REMEDY) -> InputTooLarge:
    return InputTooLarge(f"The body is larger than {limit} bytes.", remedy=remedy)


def load_json(body: bytes | str) -> Any:
    """Return the parsed body, or None if it is empty. Raise BadInput if it is not JSON, and the error of `check_json`.

    If the body may have any size, call this within `parsed_bodies.parsed`.
    """
    check_json(body)
    try:
        return loads(body) if body else None
    except orjson.JSONDecodeError as error:
        raise BadInput(f"The body is not JSON: {error}.", remedy="Send JSON.") from None


def load_output(payload: bytes) -> Any:
    """Return a parsed output of a function, or a piece of it. Raise OutputInvalid if it is not JSON, or has too many values."""
    if why := excess(payload):
        raise OutputInvalid(f"The output has {why}.", remedy="Return less, or arrays as bytes.")
    try:
        return loads(payload)
    except orjson.JSONDecodeError as error:
        raise OutputInvalid(f"The output is not JSON: {error}.", remedy="Return JSON.") from None


def validate_output(kind: type[M], payload: bytes, wrong: str, remedy: str) -> M:
    """Return an output of a function, or a piece of it, as a `kind`. Raise OutputInvalid if the output has
    too many values, or, with the message `wrong` and `remedy`, if it does not fit `kind`. If the output may have any size, call this
    within `parsed_bodies.parsed`.
    """
    if why := excess(payload):
        raise OutputInvalid(f"The output has {why}.", remedy="Return less, or arrays as bytes.")
    try:
        valid: M = _validator(kind).validate_json(payload)
    except ValidationError:
        raise OutputInvalid(wrong, remedy=remedy) from None
    return valid


def dump_json(value: Any) -> bytes:
    """Return a result of `load_json` as bytes. Raise BadInput if it is nested too deeply for orjson."""
    try:
        return dumps(value)
    except orjson.JSONEncodeError as error:
        raise BadInput(f"The body cannot be stored: {error}.", remedy="Nest it less deeply.") from None


def validate(model: type[M], found: Any, remedy: str, invalid: type[PilotflameError] = BadInput) -> M:
    """Return parsed JSON as a `model`. Raise `invalid`, with `remedy`, if it does not fit the model."""
    try:
        valid: M = _validator(model).validate_python(found)
    except ValidationError as error:
        wrong = [{"field": field, "problem": problem} for field, problem in problems(error)]
        message = "The body is invalid: {field}: {problem}.".format_map(wrong[0])
        details = {"field": wrong[0]["field"], "problems": wrong}
        raise invalid(message, remedy=remedy, details=details) from None
    return valid


def plain(asked: BaseModel, *, exclude: set[str] | None = None) -> dict[str, Any]:
    """Return the fields that a request has set, as values that JSON has. Raise BadInput if they are nested too deeply for pydantic."""
    try:
        found: dict[str, Any] = asked.model_dump(mode="json", exclude_unset=True, exclude=exclude)
    except ValueError as error:
        raise BadInput(f"The body is invalid: {error}.", remedy="Nest it less deeply.") from None
    return found


@functools.cache
def _validator(model: type[BaseModel]) -> SchemaValidator:
    return failing_fast(TypeAdapter(model))


def problems(error: ValidationError) -> list[tuple[str, str]]:
    """Return (field, problem) for the first invalid fields. The problem does not quote the field's value."""
    found = first_errors(error, MAX_PROBLEMS)
    return [(".".join(map(str, one["loc"])) or "the body", one["msg"]) for one in found]


def request_id_of(headers: Headers) -> str:
    """Return the request id that the caller sent, or a new one if it is missing or malformed."""
    sent = headers.get(REQUEST_ID_HEADER)
    return sent if sent is not None and REQUEST_ID.fullmatch(sent) else _IDS.next()


def id_of(request: web.Request) -> str:
    """Return the request id that the caller sent, or a new one. Each call with this request returns the same id."""
    found: str | None = request.get(ID)
    if found is None:
        found = request[ID] = request_id_of(request.headers)
    return found


def traceparent_of(headers: Headers) -> str:
    """Return the W3C trace context that the caller sent, or "" if it is missing or malformed."""
    sent = headers.get(TRACEPARENT_HEADER, "")
    return sent if TRACEPARENT.fullmatch(sent) else ""


def trace_of(headers: Headers) -> tuple[str, str]:
    """Return the `traceparent` and the `tracestate` that the caller sent. Each is "" if it is missing or malformed.

    Without a `traceparent`, a `tracestate` has no meaning.
    """
    if not (traceparent := traceparent_of(headers)):
        return "", ""
    state = headers.get(TRACESTATE_HEADER, "")
    return traceparent, state if TRACESTATE.fullmatch(state) else ""


def idempotency_of(headers: Headers) -> str:
    """Return the job's idempotency key, or "" without the header. Raise BadInput if it is too long.

    The prefix "key:" separates this key from the keys that dialects make from the ids of predictions and events.
    """
    key = headers.get(IDEMPOTENCY, "")
    if len(key) > MAX_KEY_CHARS:
        raise BadInput(f"{IDEMPOTENCY} has {len(key)} characters.", remedy=f"Send at most {MAX_KEY_CHARS}.")
    return f"key:{key}" if key else ""


def preferences_of(request: web.Request) -> dict[str, str]:
    """Return the preferences in the headers Prefer (RFC 7240), by name in lower case; "" without a value."""
    return parse_preferences(request.headers.getall("Prefer", ()))


def parse_preferences(lines: Iterable[str]) -> dict[str, str]:
    """Return the first MAX_PREFERENCES preferences in `lines`, the values of the headers Prefer, by name in lower case;
    "" without a value. The first preference of a name counts.
    """
    found: dict[str, str] = {}
    parts = chain.from_iterable(line.split(",", MAX_PREFERENCES) for line in lines)
    for preference in islice(parts, MAX_PREFERENCES):
        name, _, value = preference.partition(";")[0].partition("=")
        found.setdefault(name.strip().lower(), value.strip(' \t"'))
    return found


def media_type_of(headers: Headers) -> str:
    """Return the body's media type in lower case and without parameters, or "" without the header."""
    return headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip().lower()


def content_type_of(headers: Headers) -> str:
    """Return the Content-Type, or "" if it is missing or JSON_TYPE. Raise BadInput if it is not ASCII."""
    found = headers.get(hdrs.CONTENT_TYPE, "")
    if not found.isascii():
        raise BadInput("The Content-Type is not ASCII.", remedy="Send a media type, as application/json.")
    return "" if found == JSON_TYPE else found


def accept_of(headers: Headers) -> str:
    """Return the Accept header, or "" if it names none of ARRAY_TYPES. Workers negotiate only these types."""
    accept = headers.get(hdrs.ACCEPT)
    if accept is None or len(accept) > MAX_ACCEPT_CHARS or not accept.isascii():
        return ""
    lower = accept.lower()
    # Ignore callers that accept tensors. Only plugins may ask for tensors, because they can read them also as pieces of
    # a stream.
    if TENSORS_TYPE in lower:
        return ""
    return lower if any(kind in lower for kind in ARRAY_TYPES) else ""


def seconds(headers: Headers, name: str, default: float, most: float) -> float:
    """Return the seconds in a header, at most `most`; without it, `default`. Raise BadInput if invalid."""
    return default if (found := positive(headers, name, "seconds")) is None else min(found, most)


def positive(headers: Headers, name: str, unit: str) -> float | None:
    """Return the number in a header, or None without the header. Raise BadInput if it is not positive and finite."""
    if (text := headers.get(name)) is None:
        return None
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        remedy = f"It must be a positive number of {unit}."
        raise BadInput(f"The header {name} is {text!r:.100}.", remedy=remedy, details={"field": name})
    return found


def timeout_of(headers: Headers, most: float) -> float:
    """Return the smallest timeout that a header names, at most `most`, in seconds. Raise BadInput if X-Request-Timeout is not valid."""
    found = seconds(headers, TIMEOUT, most, most)
    # An invalid header of gRPC, Envoy or the OpenAI client is ignored: a library or proxy may have added it.
    if (text := headers.get(GRPC)) is not None:
        grpc = _GRPC.fullmatch(text)
        found = min(found, (int(grpc[1]) * _GRPC_UNITS[grpc[2]] if grpc else 0.0) or found)
    if (text := headers.get(ENVOY)) is not None:
        found = min(found, _decimal(text) / 1000 or found)
    if (text := headers.get(STAINLESS)) is not None:
        found = min(found, _decimal(text) or found)
    return found


def priority_of(headers: Headers, *, urgent: bool = True) -> int:
    """Return the priority, 1 (served first) to 5, or at best NORMAL if the caller is not `urgent`.

    Raise BadInput if the header is not a whole number from 1 to 5.
    """
    text = headers.get(PRIORITY)
    if text is None:
        return NORMAL
    if (found := _PRIORITIES.get(text)) is None:
        raise BadInput(f"The header {PRIORITY} is {text[:40]!r}.", remedy="Send 1 (first) to 5 (last).")
    return found if urgent else max(NORMAL, found)


class CallHeaders(NamedTuple):
    """The timeouts, trace context, accepted types and priority in the headers of a call. Requests with equal headers share them."""

    timeout_s: float
    """Infinity without a header."""
    hold_s: float | None
    traceparent: str
    tracestate: str
    accept: str
    priority: int

    @classmethod
    def read(cls, headers: Headers) -> CallHeaders:
        """Return what the headers say. Raise BadInput for a header that is not valid."""
        timeout_s, hold_s = timeout_of(headers, math.inf), positive(headers, HOLD, "seconds")
        return cls(timeout_s, hold_s, *trace_of(headers), accept_of(headers), priority_of(headers))

    def times_s(self, now_s: float, timeout_s: float, hold_s: float) -> tuple[float, float]:
        """Return the deadline of a call that has arrived at `now_s`, and the time until which it may wait for a worker.
        `timeout_s` and `hold_s` are the settings of the function.
        """
        hold_s = hold_s if self.hold_s is None else min(self.hold_s, MAX_HOLD_S)
        return now_s + min(self.timeout_s, timeout_s), now_s + hold_s


def _decimal(text: str) -> float:
    """Return the number in `text`, or 0 if `text` is not a plain decimal number. In these headers, 0 means no limit."""
    return float(text) if _DECIMAL.fullmatch(text) is not None else 0.0

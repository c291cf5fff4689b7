"""Turns the response to a CloudEvent into another CloudEvent, which brokers such as Knative's pass on.

A caller asks for such a response with `Prefer: reply`, or in structured mode with
`Accept: application/cloudevents+json`. To choose the attributes, a handler returns an event as JSON, with
`specversion`, `type` and `data`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import web

from ....errors import EventInvalid, OutputInvalid
from ....handlers.codec import JSON_TYPE
from ...front.http.parsed_bodies import parsed
from ...front.http.requests import load_output, preferences_of
from ...front.http.responses import made
from .parsing import PREFIX, STRUCTURED, ReceivedEvent, structured_event

DEFAULT_TYPE = "pilotflame.output"
# The characters that the specification allows in a header without percent-encoding: visible ASCII except " and %.
_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')


def wants_reply(request: web.Request) -> bool:
    return "reply" in preferences_of(request) or _wants_structured(request)


async def reply(request: web.Request, cause: ReceivedEvent, response: web.Response) -> web.Response:
    """Return `response`, which answers the event `cause`, as an event. Return an empty response if there is no output.

    Raise OutputInvalid if the output is meant as an event but is not a valid event.
    """
    body, headers = bytes(response.body or b""), response.headers.copy()  # type: ignore[arg-type]
    kind = headers.popone("Content-Type", JSON_TYPE)
    if body in (b"null", b"") and kind == JSON_TYPE:
        return web.Response(status=204, headers=headers)
    event = await _event(request, cause, response.headers["X-Request-Id"], body, kind)
    kind = event.content_type or JSON_TYPE
    if _wants_structured(request):
        whole = await made(request, len(body), partial(_structured, event, kind))
        return web.Response(body=whole, headers=headers, content_type=STRUCTURED)
    sent = {name: value for name, value in event.attributes.items() if name != "datacontenttype"}
    headers.update({f"{PREFIX}{name}": _header(value) for name, value in sent.items()})
    headers["Content-Type"] = kind
    return web.Response(body=event.data, headers=headers)


async def _event(
    request: web.Request, cause: ReceivedEvent, request_id: str, body: bytes, kind: str
) -> ReceivedEvent:
    attributes = {
        "specversion": "1.0", "id": request_id, "source": request.path, "type": DEFAULT_TYPE,
        "causationid": cause.attributes["id"],
    }  # fmt: skip
    # Most outputs are not events. So parse only an output that contains "specversion".
    if kind == JSON_TYPE and b'"specversion"' in body:
        return await parsed(request, body, partial(_event_in, attributes), called=True)
    return ReceivedEvent(attributes, body, kind)


def _event_in(attributes: dict[str, Any], output: bytes) -> ReceivedEvent:
    """Return an output in JSON as an event.

    If the output is itself an event, return that event, and take missing attributes from `attributes`. Otherwise return an
    event with `attributes`, whose data is the output.
    """
    found = load_output(output)
    if not isinstance(found, dict) or "specversion" not in found:
        return ReceivedEvent(attributes, output, JSON_TYPE)
    try:
        return structured_event({**attributes, **found})
    except EventInvalid as error:
        raise OutputInvalid(f"The answer is no CloudEvent: {error.message}", remedy=error.remedy) from None


def _structured(event: ReceivedEvent, kind: str) -> bytes:
    attributes: Mapping[str, Any] = {**event.attributes, "datacontenttype": kind}
    if event.content_type in ("", JSON_TYPE):
        return orjson.dumps({**attributes, "data": orjson.Fragment(event.data or b"null")})
    return orjson.dumps({**attributes, "data_base64": base64.b64encode(event.data).decode()})


def _header(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return quote(text, safe=_SAFE)


def _wants_structured(request: web.Request) -> bool:
    return STRUCTURED in request.headers.get("Accept", "").lower()

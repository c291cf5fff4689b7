"""The answer: errors of the tree as typed JSON, and events of a stream, the same from every route."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

import orjson
from aiohttp import web

from ...errors import PilotflameError
from ...handlers.codec import JSON_TYPE
from .requests import request_id_of

EVENT_STREAM_TYPE = "text/event-stream"
# While a caller waits for something to come of a stream, so often a comment keeps proxies from hanging up.
HEARTBEAT_S = 5.0
RETRY_AFTER_S = {429: 1.0, 503: 2.0}
"""When to come again, in seconds, for errors that do not say so themselves."""

Route = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Response(NamedTuple):
    """An answer that is all there, before it takes the form in which it is sent."""

    status: int
    headers: dict[str, str]
    body: bytes

    def response(self) -> web.Response:
        return web.Response(status=self.status, headers=self.headers, body=self.body)


def error_reply(
    error: PilotflameError, request_id: str = "", headers: Mapping[str, str] | None = None
) -> Response:
    """The typed JSON error: `{"error": {"type", "message", "remedy", "details", "request_id"}}`."""
    told = dict(headers) if headers is not None else {"X-Request-Id": request_id} if request_id else {}
    told.update(retry_headers(error))
    told["Content-Type"] = JSON_TYPE
    body = {"error": {**error.to_wire(), **({"request_id": request_id} if request_id else {})}}
    return Response(error.status, told, orjson.dumps(body))


def error_response(
    error: PilotflameError, request_id: str = "", headers: Mapping[str, str] | None = None
) -> web.Response:
    """`error_reply` as a route answers it."""
    return error_reply(error, request_id, headers).response()


def retry_headers(error: PilotflameError) -> dict[str, str]:
    """When a refused caller may come again: in whole seconds, as HTTP wants it, and exactly for those who read that."""
    if error.status not in RETRY_AFTER_S:
        return {}
    wait_s = float(error.details.get("retry_after_s", RETRY_AFTER_S[error.status]))
    return {
        "Retry-After": str(max(1, math.ceil(wait_s))),
        "retry-after-ms": str(max(1, math.ceil(wait_s * 1000))),
    }


def typed(route: Route) -> Route:
    """A route that answers errors of the tree by their status."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await route(request)
        except PilotflameError as error:
            return error_response(error, request_id_of(request.headers))

    return answer


def event(name: str, data: bytes, number: int = 0) -> bytes:
    """One server-sent event; with a number, which a reader may come back with, if it has a place in the stream."""
    place = b"id: %d\n" % number if number else b""
    return place + b"event: %s\ndata: %s\n\n" % (name.encode(), data)

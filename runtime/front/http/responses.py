"""Makes responses: JSON, typed errors as JSON, and compressed bodies for callers that accept them."""

from __future__ import annotations

import functools
import importlib
import math
import sys
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, NamedTuple, NotRequired, TypeVar

import orjson
from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http import SERVER_SOFTWARE
from pydantic import WithJsonSchema, with_config
from typing_extensions import TypedDict

from ...._version import __version__
from ....errors import (
    CallEnded,
    FunctionStopped,
    MalformedRequest,
    MethodNotAllowed,
    PilotflameError,
    Unauthorized,
    UnknownRoute,
)
from ....handlers.codec import JSON_TYPE
from ....handlers.contract import NOTHING
from ....handlers.negotiation import weigh
from ...calls.serving.invocation import Invocation
from ...ground.access.keys import Caller, Scope
from .requests import BODY_BYTES, Headers, awaits_continue, in_turn
from .sliced_body import SlicedBody

# The standard library has zstd since Python 3.14. The backport can be installed only on older versions.
zstd = importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

SERVER = f"pilotflame/{__version__}"
DEPLOYS = "/v1/functions"
"""The path of the route that deploys."""
VERSIONS = (HttpVersion10, HttpVersion11)
RETRY_AFTER_S = {429: 1.0, 503: 2.0}
"""The seconds for Retry-After, by status, if the error's details have no `retry_after_s`."""
STALE_HEADER = "X-Revision-Stale"
"""Marks answers of a gateway that may not serve the newest revision."""
STOPPED_S = 60.0
"""The seconds for Retry-After while a function is stopped until a person acts."""
MIN_COMPRESSED_BYTES = 1024
"""A smaller body is not compressed, because it fits into one or two packets anyway."""
MAX_ON_LOOP_BYTES = 16 << 10
"""A larger body is compressed or hashed in a thread, so that it does not block the event loop."""
COMPRESSION_LEVEL = 1
_GZIP_BITS = zlib.MAX_WBITS | 16
_COMPRESSIBLE = ("application/json", "application/xml", "application/javascript", "application/x-ndjson")

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
InTurn = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""Runs work in a thread once it is the caller's turn."""
Timestamp = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class ErrorFields(TypedDict):
    """The fields of an error; `type` is its stable code."""

    type: str
    message: str
    remedy: NotRequired[str]
    details: NotRequired[dict[str, Any]]
    request_id: NotRequired[str]


@with_config(title="Error")
class ErrorBody(TypedDict):
    """The body of every error."""

    error: ErrorFields


class Response(NamedTuple):
    """A complete response. aiohttp sends the result of `response`; `transport.py` sends bytes."""

    status: int
    headers: dict[str, str]
    body: bytes

    def response(self) -> web.Response:
        return web.Response(status=self.status, headers=self.headers, body=self.body)


ErrorFormat = Callable[[PilotflameError, str], Response]
"""A function that returns the response for an error and a request id."""


def json_response(
    body: Any, *, status: int = 200, headers: Headers | None = None, no_store: bool = False
) -> web.Response:
    """Return a response with `body` as JSON. `no_store` keeps the response out of caches."""
    response = web.Response(body=orjson.dumps(body), status=status, headers=headers, content_type=JSON_TYPE)
    if no_store:
        response.headers["Cache-Control"] = "no-store"
    return response


async def made(request: web.Request, size: int, make: Callable[[], T], most: int = MAX_ON_LOOP_BYTES) -> T:
    """Call `make` and return its result. `size` is the number of bytes that `make` works on. If `size` exceeds
    `most`, call `make` in a thread once it is the caller's turn.
    """
    return await in_turn(request, make) if size > most else make()


async def dumped(request: web.Request, dump: Callable[[T], bytes], event: T) -> bytes:
    """Return `event`, which was made from the request's body, as bytes. If the body is large, call `dump` in a thread."""
    return await made(request, request.get(BODY_BYTES, 0), functools.partial(dump, event))


async def outputs_response(
    request: web.Request,
    size: int,
    show: Callable[[], Any],
    *,
    status: int = 200,
    headers: Headers | None = None,
) -> web.Response:
    """Return a response with the result of `show` as JSON. `size` is the number of bytes of outputs in it."""
    body = await made(request, size, lambda: orjson.dumps(show()))
    return web.Response(body=body, status=status, headers=headers, content_type=JSON_TYPE)


def json_with_large(
    name: str,
    value: bytes,
    others: Mapping[str, Any],
    *,
    status: int = 200,
    headers: Headers | None = None,
) -> web.Response:
    """Return a response with a JSON object that has the members `others`, and then `name`, whose value is JSON already
    and is not copied. `others` must not be empty.
    """
    parts = [orjson.dumps(others)[:-1], b',"%s":' % name.encode(), value, b"}"]
    return web.Response(body=SlicedBody(parts, JSON_TYPE), status=status, headers=headers)


def timestamp(at_s: float) -> Timestamp:
    """Return a Unix timestamp in seconds as an ISO 8601 string with milliseconds."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def error_reply(
    error: PilotflameError, request_id: str = "", headers: Headers | None = None, *, private: bool = False
) -> Response:
    """Return the response for an error: `{"error": {"type", "message", "remedy", "details", "request_id"}}`.

    Without `headers`, the response has the header X-Request-Id. With `private`, the details include the traceback of
    user code, and the error may say where the function's weights are.
    """
    error = error.whole if private else error
    sent = dict(headers) if headers is not None else {"X-Request-Id": request_id} if request_id else {}
    sent |= retry_headers(error) | {"Content-Type": JSON_TYPE}
    body = {"error": {**error.to_wire(private=private), **({"request_id": request_id} if request_id else {})}}
    return Response(error.status, sent, orjson.dumps(body))


def retry_headers(error: PilotflameError) -> dict[str, str]:
    """Return headers that tell when to retry, or none if the error's status does not invite a retry."""
    if error.status not in RETRY_AFTER_S:
        # Some clients repeat a request after any 5xx, unless this header forbids it.
        return {"x-should-retry": "false"} if isinstance(error, CallEnded) else {}
    usual_s = STOPPED_S if isinstance(error, FunctionStopped) else RETRY_AFTER_S[error.status]
    wait_s = max(0.001, float(error.details.get("retry_after_s", usual_s)))
    return {"Retry-After": str(math.ceil(wait_s)), "retry-after-ms": str(math.ceil(wait_s * 1000))}


def invocation_headers(invocation: Invocation) -> dict[str, str]:
    headers = {
        "X-Request-Id": invocation.id,
        "X-Worker-Id": invocation.worker,
        "X-Cold-Start": "true" if invocation.timeline.cold else "false",
        "Server-Timing": invocation.timeline.server_timing(),
    }
    if invocation.traceparent:
        headers["traceparent"] = invocation.traceparent
    if invocation.cache_status:
        headers["Cache-Status"] = invocation.cache_status
    return headers


class ErrorResponses:
    """Turns errors into responses, in the form that the caller of a path expects."""

    def __init__(
        self, formats: Mapping[str, ErrorFormat], owns: Callable[[Caller, str], bool], unrouted: Mapping[str, ErrorFormat] = NOTHING,
    ) -> None:  # fmt: skip
        """`formats` maps beginnings of paths, or whole paths of routes, to error formats. `unrouted` maps beginnings of paths to
        the error formats for paths without a route. All other paths use `error_reply`.

        `owns` returns True if a caller may see tracebacks of a function.
        """
        self._formats, self._owns, self._unrouted = formats, owns, unrouted

    def response(
        self, error: PilotflameError, request_id: str, target: str, path: str, caller: Caller, function: str | None
    ) -> Response:  # fmt: skip
        """Return the response for an error. `target` is the path as the caller sent it, and `path` the registered path of its route."""
        formats = [form for key, form in self._formats.items() if key == path]
        formats += [form for key, form in self._formats.items() if target.startswith(key)]
        if not path:
            formats += [form for key, form in self._unrouted.items() if target.startswith(key)]
        if not formats and error.private and self._shows_private(caller, function, path):
            response = error_reply(error, request_id, private=True)
        else:
            response = [*formats, error_reply][0](error, request_id)
        if isinstance(error, Unauthorized):
            response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        return response

    def _shows_private(self, caller: Caller, function: str | None, path: str) -> bool:
        if function is None:
            # The caller of a deploy has sent the code, and so may see the traceback.
            return path == DEPLOYS and caller.has(Scope.DEPLOY)
        return self._owns(caller, function)


def not_routed(request: web.Request, error: web.HTTPException) -> PilotflameError:
    """Return the typed error for a request that aiohttp has refused, because its path or method is unknown."""
    target = f"{request.path[:128]!r}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        remedy = f"It takes {error.headers[hdrs.ALLOW]}."
        return MethodNotAllowed(f"{target} does not take {request.method[:32]!r}.", remedy=remedy)
    return UnknownRoute(f"There is nothing at {target}.", remedy="/openapi.json lists the routes.")


def check_version(request: web.Request) -> None:
    """Raise MalformedRequest unless the request is HTTP/1.0 or HTTP/1.1. aiohttp also parses HTTP/0.9 and HTTP/2.0."""
    if request.version not in VERSIONS:
        version = ".".join(map(str, request.version))
        raise MalformedRequest(f"This is HTTP/{version}.", remedy="Send HTTP/1.1 or HTTP/1.0.")


def complete_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Name the server. Remove the Content-Type that aiohttp adds to a response without a body."""
    # Keep another name that a function has set.
    if response.headers.get(hdrs.SERVER) in (None, SERVER_SOFTWARE):
        response.headers[hdrs.SERVER] = SERVER
    # Close the connection. A client that expects 100-continue and is refused does not send the body that it has
    # announced.
    if request.version not in VERSIONS or awaits_continue(request):
        response.headers[hdrs.CONNECTION] = "close"
        response.force_close()
    if isinstance(response, web.Response) and response.body is None:
        response.headers.popall(hdrs.CONTENT_TYPE, None)


def name_coding(
    sent: Headers, headers: MutableMapping[str, str], media_type: str, body: bytes | SlicedBody
) -> str:
    """Choose how the body of a response is compressed, and name this coding in the headers of the response. Return the
    coding, or "" if the body is not compressed. aiohttp's own compression supports neither zstd nor the quality values of
    Accept-Encoding.
    """  # fmt: skip
    if not pays(body, media_type) or "Content-Encoding" in headers:
        return ""
    headers["Vary"] = "Accept-Encoding"
    if coding := choose_coding(sent.get(hdrs.ACCEPT_ENCODING, "")):
        headers["Content-Encoding"] = coding
    return coding


def choose_coding(accept_encoding: str) -> str:
    """Return the coding that the caller prefers: "zstd", "gzip" or, for no compression, "".

    zstd is used only if the header names it. A caller that only accepts any coding ("*") gets gzip.
    """
    zstd_weight, gzip_weight, plain = (weigh(accept_encoding, name) for name in ("zstd", "gzip", "identity"))
    zstd_quality = zstd_weight.quality if zstd_weight.exact else 0.0
    best = max(zstd_quality, gzip_weight.quality)
    if not best or (plain.exact and plain.quality > best):
        return ""
    return "zstd" if zstd_quality == best else "gzip"


async def compress(body: bytes | SlicedBody, coding: str, in_turn: InTurn) -> bytes:
    """Return the compressed body of a response. Compress a large body with `in_turn`, which uses a thread."""
    parts = body.parts if isinstance(body, SlicedBody) else [body]
    if isinstance(body, bytes) and len(body) <= MAX_ON_LOOP_BYTES:
        return compress_now(parts, coding)
    return await in_turn(functools.partial(compress_now, parts, coding))


def compress_now(parts: Sequence[bytes], coding: str) -> bytes:
    """Return the body compressed with "zstd" or "gzip". Blocks: use `compress` on the event loop."""
    if coding == "zstd":
        packer = zstd.ZstdCompressor(COMPRESSION_LEVEL)
    else:
        packer = zlib.compressobj(COMPRESSION_LEVEL, wbits=_GZIP_BITS)
    return b"".join([*map(packer.compress, parts), packer.flush()])


def pays(body: bytes | SlicedBody, kind: str) -> bool:
    """Return True if a body of media type `kind` should be compressed, because the body is text and not short."""
    size = body.size if isinstance(body, SlicedBody) else len(body)
    return size >= MIN_COMPRESSED_BYTES and (
        kind.startswith("text/") or kind in _COMPRESSIBLE or kind.endswith(("+json", "+xml"))
    )

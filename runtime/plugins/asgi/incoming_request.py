"""Makes the facts of a request for a web app. Headers that only concern the gateway are left out."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from aiohttp import hdrs, web
from multidict import CIMultiDictProxy
from yarl import URL

from ...access.control_socket import CONTROL_KEY
from ...api.guard import KEY_HEADERS
from ...http.origins import Origins
from .messages import Header
from .scope import HTTP, WEBSOCKET, Facts

# Headers of one connection. The app's connection is another one.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade", CONTROL_KEY.lower().encode())
)  # fmt: skip
"""The control key concerns the gateway alone."""
DECODED = frozenset({"gzip", "deflate", "br", "zstd"})
_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)


class Incoming(NamedTuple):
    """The parts of a request that its facts are made of."""

    method: str
    minor: int
    """1 for HTTP/1.1, 0 for HTTP/1.0."""
    url: URL
    headers: CIMultiDictProxy[str]
    raw_headers: tuple[Header, ...]
    transport: asyncio.BaseTransport | None
    scheme: str


def incoming(request: web.Request, origins: Origins) -> Incoming:
    """Return the parts of a request of aiohttp. A trusted proxy may have told its scheme."""
    scheme = origins.of(request).partition(":")[0] if origins.trusts(request.remote) else request.scheme
    minor = request.version.minor
    return Incoming(
        request.method,
        minor,
        request.rel_url,
        request.headers,
        request.raw_headers,
        request.transport,
        scheme,
    )


def facts_of(request: Incoming, root_path: str, *, keyed: bool, alone: bool = False) -> Facts:
    """Return the facts of a request. `keyed` is True if it holds an API key of this gateway.

    `alone` is True if the request names the app's own host. Then the caller sent a path without `root_path`.
    """
    websocket, raw_path = is_websocket(request), request.url.raw_path
    if alone:
        raw_path, root_path = raw_path.removeprefix(root_path), ""
    scheme = request.scheme
    if websocket:
        scheme = "wss" if scheme == "https" else "ws"
    return Facts(
        WEBSOCKET if websocket else HTTP, f"1.{request.minor}", request.method, scheme, raw_path,
        request.url.raw_query_string, root_path, _headers(request, keyed=keyed), *_addresses(request.transport),
    )  # fmt: skip


def is_websocket(request: Incoming | web.Request) -> bool:
    upgrade = request.headers.get(hdrs.UPGRADE)
    return upgrade is not None and upgrade.lower() == "websocket" and request.method == "GET"


def _headers(request: Incoming, *, keyed: bool) -> list[Header]:
    """Return the headers without those that only concern the connection or the gateway."""
    found = [(name.lower(), value) for name, value in request.raw_headers]
    left_out = HOP_BY_HOP | _KEY_HEADERS if keyed else HOP_BY_HOP
    connection = request.headers.get(hdrs.CONNECTION)
    if connection is not None:
        left_out = left_out | {
            one.strip().lower().encode("utf-8", "replace") for one in connection.split(",")
        }
    if request.headers.get(hdrs.CONTENT_ENCODING, "").lower() in DECODED:
        # aiohttp has decoded the body.
        left_out = left_out | {b"content-encoding", b"content-length"}
    return [header for header in found if header[0] not in left_out]


def _addresses(transport: asyncio.BaseTransport | None) -> tuple[Any, Any]:
    """Return the addresses of the caller and of the gateway, each (host, port), or None over a unix socket."""
    if transport is None:
        return None, None
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return peer[:2] if isinstance(peer, tuple) else None, own[:2] if isinstance(own, tuple) else None

"""Reads the facts of a request for a web app: what the app may know of it."""

from __future__ import annotations

from typing import Any

from aiohttp import hdrs, web

from ...access.control_socket import CONTROL_KEY
from ...http.origins import Origins
from .messages import Header
from .scope import HTTP, WEBSOCKET, Facts

# Headers of one connection. The app's connection is another one.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip
_CONTROL_KEY = CONTROL_KEY.lower().encode()
_AUTHORIZATION = b"authorization"


def facts_of(
    request: web.Request, origins: Origins, root_path: str, *, keyed: bool, alone: bool = False
) -> Facts:
    """Return the facts of a request. `keyed` is True if its Authorization header is an API key of this gateway.

    `alone` is True if the request names the app's own host. Then the caller sent a path without `root_path`.
    """
    websocket = is_websocket(request)
    url, version = request.rel_url, request.version
    scheme = origins.of(request).partition(":")[0] if origins.trusts(request) else request.scheme
    return Facts(
        WEBSOCKET if websocket else HTTP,
        "1.1" if version.minor else "1.0",
        request.method,
        ("wss" if scheme == "https" else "ws") if websocket else scheme,
        url.raw_path.removeprefix(root_path) if alone else url.raw_path, url.raw_query_string, "" if alone else root_path,
        _headers(request, keyed=keyed),
        *_addresses(request),
    )  # fmt: skip


def is_websocket(request: web.Request) -> bool:
    upgrade = request.headers.get(hdrs.UPGRADE)
    return upgrade is not None and upgrade.lower() == "websocket" and request.method == "GET"


def _headers(request: web.Request, *, keyed: bool) -> list[Header]:
    """Return the headers without those that only concern the connection or the gateway."""
    found = [(name.lower(), value) for name, value in request.raw_headers]
    left_out = {_CONTROL_KEY, _AUTHORIZATION} if keyed else {_CONTROL_KEY}
    connection = request.headers.get(hdrs.CONNECTION)
    if connection is not None:
        left_out |= {one.strip().lower().encode("utf-8", "replace") for one in connection.split(",")}
    return [header for header in found if header[0] not in HOP_BY_HOP and header[0] not in left_out]


def _addresses(request: web.Request) -> tuple[Any, Any]:
    """Return the addresses of the caller and of the gateway, each (host, port), or None over a unix socket."""
    transport = request.transport
    if transport is None:
        return None, None
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return tuple(peer[:2]) if isinstance(peer, tuple) else None, (
        tuple(own[:2]) if isinstance(own, tuple) else None
    )

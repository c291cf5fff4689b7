"""Turns a request for a web app into Facts for the worker, without the headers that only concern the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import hdrs, web

from ...front.http.guard import KEY_HEADERS
from ...front.listening.origins import Origins
from ...ground.access.control_socket import CONTROL_KEY
from .messages import HeaderPair
from .scope import HTTP, WEBSOCKET, Facts

# Headers about one connection. Do not pass them on, because the app and the caller have no common connection.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
     b"transfer-encoding", b"upgrade", CONTROL_KEY.lower().encode())
)  # fmt: skip
"""The control key is among them, because it is only for the gateway."""
_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)


def scheme_of(request: web.Request, origins: Origins) -> str:
    """Return "http" or "https". If a trusted proxy sent the request, return the scheme that the proxy's headers name."""
    return origins.of(request).partition(":")[0] if origins.trusts(request.remote) else request.scheme


def facts_of(request: web.Request, scheme: str, root_path: str, *, keyed: bool, alone: bool = False) -> Facts:
    """Return the facts of a request. `keyed` is True if the caller sent an API key of this gateway. Then omit the
    headers that may contain the key.

    `alone` is True if the request names the app's own host. Then remove `root_path`, which the gateway has put before the
    caller's path.
    """
    websocket, raw_path = is_websocket(request), request.rel_url.raw_path
    if alone:
        raw_path, root_path = raw_path.removeprefix(root_path), ""
    if websocket:
        scheme = "wss" if scheme == "https" else "ws"
    return Facts(
        WEBSOCKET if websocket else HTTP, f"1.{request.version.minor}", request.method, scheme, raw_path,
        request.rel_url.raw_query_string, root_path, _headers(request, keyed=keyed), *_addresses(request.transport),
    )  # fmt: skip


def is_websocket(request: web.Request) -> bool:
    upgrade = request.headers.get(hdrs.UPGRADE)
    return upgrade is not None and upgrade.lower() == "websocket" and request.method == "GET"


def _headers(request: web.Request, *, keyed: bool) -> list[HeaderPair]:
    """Return the headers without those that only concern the connection or the gateway."""
    found = [(name.lower(), value) for name, value in request.raw_headers]
    left_out = HOP_BY_HOP | _KEY_HEADERS if keyed else HOP_BY_HOP
    connection = request.headers.get(hdrs.CONNECTION)
    if connection is not None:
        left_out = left_out | {
            one.strip().lower().encode("utf-8", "replace") for one in connection.split(",")
        }
    return [header for header in found if header[0] not in left_out]


def _addresses(transport: asyncio.BaseTransport | None) -> tuple[Any, Any]:
    """Return the addresses of the caller and of the gateway, each (host, port), or None over a unix socket."""
    if transport is None:
        return None, None
    peer, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    return peer[:2] if isinstance(peer, tuple) else None, own[:2] if isinstance(own, tuple) else None

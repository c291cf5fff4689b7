"""Checks at start whether `FastConnection` works with the installed aiohttp, whose private names it uses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from .connection import FastConnection, RequestTaker, missing_internals
from .responses import Response

LIMIT_S = 2.0
# The probe leaves the second request to aiohttp. All four requests come on one connection.
PATHS = ("/fast", "/slow", "/fast", "/fast")


class _Answered:
    """A request that the probe has taken."""

    owner = ""

    def abandon(self) -> None: ...


class _Probe:
    """A fast path that answers each request to /fast."""

    def __init__(self) -> None:
        self.taken = 0

    def take(
        self, message: Any, payload: Any, _transport: Any, send: Callable[[Response], None]
    ) -> _Answered | None:
        if message.path != "/fast":
            return None
        self.taken += 1
        body = bytes(payload.read_nowait())
        asyncio.get_running_loop().call_soon(send, Response(200, {"X-Request-Id": "probe"}, b"fast " + body))
        return _Answered()


async def why_not_fast() -> str:
    """Return why the fast path cannot be used with the installed aiohttp; "" if it can."""
    if missing := missing_internals():
        return f"it lacks {', '.join(missing)}"
    probe = _Probe()
    try:
        async with asyncio.timeout(LIMIT_S):
            found = await _served(probe)
    # Another release of aiohttp may raise any error, or not answer. The gateway then serves without the fast path.
    except Exception as error:  # noqa: BLE001
        return f"requests that were tried have failed ({type(error).__name__}: {error})"
    wanted = [f"{path[1:]} {number}" for number, path in enumerate(PATHS)]
    if found != wanted or probe.taken != PATHS.count("/fast"):
        return f"requests that were tried got {found} in place of {wanted}"
    return ""


async def _served(probe: _Probe) -> list[str]:
    """Return the bodies of the answers to requests of `PATHS`, sent one after the other."""
    server = web.Server(_slow)
    near, far = socket.socketpair()
    loop, fast_path = asyncio.get_running_loop(), cast("RequestTaker", probe)
    transport, _ = await loop.connect_accepted_socket(
        lambda: FastConnection(server, fast_path, header_timeout_s=LIMIT_S), near
    )
    reader, writer = await asyncio.open_connection(sock=far)
    try:
        found = list[str]()
        for number, path in enumerate(PATHS):
            body = str(number)
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split()[0])
            found.append((await reader.readexactly(length)).decode())
        return found
    finally:
        writer.close()
        await server.shutdown(LIMIT_S)
        transport.abort()


async def _slow(request: web.BaseRequest) -> web.StreamResponse:
    return web.Response(text=f"slow {(await request.read()).decode()}")

"""Answers requests whose bodies are not read, such as refused uploads."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from .requests import awaits_continue
from .responses import Handler

DISCARD_S = 2.0
DISCARD_BYTES = 64 << 20


@web.middleware
async def discard_unread_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Throw the rest of a body away after the response, within limits. Then aiohttp closes the connection.

    A client that sends its body before it reads the response would lose the response if the connection was closed at
    once: if a socket is closed with unread bytes, the kernel resets the connection.
    """
    response = await handler(request)
    content = request.content
    if not content.is_eof() and not awaits_continue(request):
        await response.prepare(request)
        await response.write_eof()
        size = 0
        # The body may be broken, which changes nothing: the response has been sent.
        with contextlib.suppress(TimeoutError, web.RequestPayloadError, ConnectionError):
            async with asyncio.timeout(DISCARD_S):
                while size < DISCARD_BYTES and (part := await content.readany()):
                    size += len(part)
    return response

"""The floor of an HTTP answer here: a bare aiohttp server on uvloop that sends back what it was sent."""

from __future__ import annotations

import asyncio
import socket

import uvloop
from aiohttp import web


async def _echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read(), content_type="application/json")


async def _serve() -> None:
    app = web.Application()
    app.router.add_post("/", _echo)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    await web.SockSite(runner, listener).start()
    print(f'{{"url": "http://127.0.0.1:{listener.getsockname()[1]}"}}', flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve())

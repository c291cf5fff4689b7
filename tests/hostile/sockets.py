"""A web app whose WebSockets read all messages, or none at a path that ends with "deaf". Its other requests fail."""

import asyncio


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        return
    if scope["type"] == "http":
        while (await receive()).get("more_body"):
            pass
        raise ValueError("x" * 100_000)
    await receive()
    await send({"type": "websocket.accept"})
    if scope["path"].endswith("deaf"):
        await asyncio.sleep(3600)
    while (await receive())["type"] != "websocket.disconnect":
        pass

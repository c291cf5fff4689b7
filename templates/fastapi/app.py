"""A FastAPI app: routes, a streamed response, a WebSocket, and a model that its lifespan loads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, object]]:
    """Runs once in each worker. With `snapshot` in pilotflame.toml, load the weights here:
    `app.state.pilotflame.snapshot.load(Model())`.
    """
    yield {"words": ["Hello", "Good morning"]}


app = FastAPI(title="fastapi", lifespan=lifespan)


class Greeting(BaseModel):
    name: str = Field("world", max_length=100)


@app.get("/")
async def root(request: Request) -> dict[str, str]:
    return {"greeting": f"{request.state.words[0]}, world.", "docs": str(request.url_for("swagger_ui_html"))}


@app.post("/greet")
async def greet(greeting: Greeting, request: Request) -> dict[str, str]:
    return {"greeting": f"{request.state.words[0]}, {greeting.name}."}


@app.get("/count")
async def count(to: int = 3) -> StreamingResponse:
    """Sends a line every tenth of a second. The caller gets each line at once."""

    async def lines() -> AsyncIterator[str]:
        for number in range(1, to + 1):
            yield f"{number}\n"
            await asyncio.sleep(0.1)

    return StreamingResponse(lines(), media_type="text/plain")


@app.websocket("/echo")
async def echo(socket: WebSocket) -> None:
    """Sends each text back. When the worker ends, the client gets close code 1012 and connects again."""
    await socket.accept()
    try:
        while True:
            await socket.send_text(await socket.receive_text())
    except WebSocketDisconnect:
        pass

"""Apps in workers: their lifespan, their imports, WSGI apps, and events in place of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from live import LIMIT_S, Gate, Gateway, failure, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

FASTAPI = """
import asyncio, gate
from contextlib import asynccontextmanager
from fastapi import FastAPI, Request, WebSocket, WebSocketDisconnect
from fastapi.responses import StreamingResponse

@asynccontextmanager
async def lifespan(app):
    gate.say("startup " + app.state.pilotflame.function)
    yield {"word": ["startup"]}
    gate.say("shutdown")

app = FastAPI(lifespan=lifespan)

@app.get("/state")
async def state(request: Request):
    request.state.word = [*request.state.word, "mine"]
    return [request.state.word, request.state.pilotflame.id, request.app.state.pilotflame.function]

@app.post("/items/{number}")
async def item(number: int, request: Request, limit: int = 1):
    return {"number": number, "limit": limit, "body": await request.json(), "token": request.headers.get("x-token")}

@app.get("/text")
async def text():
    return StreamingResponse(iter(["a", "b"]), media_type="text/plain")

@app.get("/slow")
async def slow():
    async def parts():
        for number in range(10):
            yield f"{number}"
            await asyncio.sleep(0.02)
    return StreamingResponse(parts())

@app.websocket("/socket")
async def socket(socket: WebSocket):
    await socket.accept()
    try:
        while True:
            await socket.send_text(await socket.receive_text())
    except WebSocketDisconnect:
        pass
"""

FLASK = """
from flask import Flask, Response, request

app = Flask("x")

@app.route("/<path:path>", methods=["GET", "POST"])
def echo(path):
    return {"path": request.path, "root": request.script_root, "body": request.get_data(as_text=True)}

@app.get("/stream")
def stream():
    return Response(iter(["a", "b", "c"]))
"""


async def test_the_lifespan_runs_once_in_each_worker(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate
) -> None:
    function = await deploy_app(FASTAPI, {"scale.idle_timeout_s": 0.1}, gate=gate)
    started = await gate.next(f"startup {function.name}")
    ended = await gate.next("shutdown")
    assert started.pid == ended.pid
    for _ in range(2):
        found = (
            await gateway.client.get(f"/asgi/{function.name}/state", headers={"X-Request-Id": "r-1"})
        ).json()
        # Each request gets its own copy of the lifespan's state, so the second request has no "mine" from the first one.
        assert found == [["startup", "mine"], "r-1", function.name]
    await gate.next(f"startup {function.name}")


@pytest.mark.parametrize(
    ("lifespan", "message"),
    [
        ("raise ValueError('no weights')", "no weights"),
        ("await send({'type': 'lifespan.startup.failed', 'message': 'no disk'})", "no disk"),
    ],
)
async def test_a_startup_that_fails_fails_the_deploy(gateway: Gateway, lifespan: str, message: str) -> None:
    source = f"async def app(scope, receive, send):\n    await receive()\n    {lifespan}\n"
    response = await gateway.send(None, {"asgi": "app:app"}, files={"app.py": source})
    assert message in failure(response)["message"]


async def test_an_app_in_a_package_is_imported_as_uvicorn_does(gateway: Gateway) -> None:
    source = "from helper import VALUE\nasync def api(scope, receive, send): ...\n"
    response = await gateway.send(
        None, {"asgi": "main:api"}, files={"main.py": source, "helper.py": "VALUE = 1\n"}
    )
    assert response.status_code == 201, response.text
    response = await gateway.send(
        None, {"asgi": "main:app"}, files={"main.py": source, "helper.py": "VALUE = 1\n"}
    )
    error = failure(response)
    assert "main.py has no app called 'app'" in error["message"]
    error = failure(await gateway.send(None, {"asgi": "shop.main:app"}))
    assert "shop/main.py is not in the function's folder" in error["message"]


async def test_an_event_is_a_request(gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate) -> None:
    function = await deploy_app(FASTAPI, gate=gate)
    event = {"path": "/items/3?limit=2", "body": {"n": 1}, "headers": {"X-Token": "t"}}
    assert await function.answer(event) == {"number": 3, "limit": 2, "body": {"n": 1}, "token": "t"}
    assert (await function.call({"path": "/text"})).text == '"ab"'
    error = await function.error({"path": "/items/x", "body": 1})
    assert (error["status"], error["details"]["status"]) == (500, 422)
    assert "status 422 to POST /items/x" in error["message"]
    for wrong in (None, [], {"path": "items"}, {"path": "/", "bodi": 1}):
        error = await function.error(wrong)
        assert error["status"] == 400
        assert '{"path": "/items"}' in error["remedy"]
    job = await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": event})
    assert job.json()["output"]["number"] == 3


async def test_a_wsgi_app_runs(gateway: Gateway) -> None:
    function = await gateway.deploy(None, {"wsgi": "app:app"}, files={"app.py": FLASK})
    base = f"/asgi/{function.name}"
    found = (await gateway.client.post(f"{base}/a/b", content=b"x" * 100_000)).json()
    assert found == {"path": "/a/b", "root": base, "body": "x" * 100_000}
    assert (await gateway.client.get(f"{base}/stream")).text == "abc"
    answers = await asyncio.gather(*[gateway.client.get(f"{base}/{n}") for n in range(50)])
    assert {answer.json()["path"] for answer in answers} == {f"/{n}" for n in range(50)}


class Load:
    """Callers that call an app, read its streams and talk over WebSockets until `stop` is set."""

    def __init__(self, gateway: Gateway, function: str) -> None:
        self.stop, self.wrong = asyncio.Event(), list[str]()
        self.ended = {"call": 0, "stream": 0, "reconnect": 0}
        self._client, self._base = gateway.client, f"/asgi/{function}"
        self._socket_url = f"{gateway.url}{self._base}/socket"

    async def call(self, kind: str, path: str, text: str) -> None:
        while not self.stop.is_set():
            response = await self._client.get(self._base + path)
            if (response.status_code, response.text) != (200, text):
                self.wrong.append(f"{kind}: {response.status_code} {response.text[:200]}")
            self.ended[kind] += 1

    async def hold(self, session: aiohttp.ClientSession) -> None:
        while not self.stop.is_set():
            async with session.ws_connect(self._socket_url) as socket:
                await self._talk(socket)

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while not self.stop.is_set():
            # The gateway may close the WebSocket just before this message is sent.
            with contextlib.suppress(ConnectionError):
                await socket.send_str("x")
            message = await socket.receive()
            if message.type is not aiohttp.WSMsgType.TEXT:
                if (message.type, message.data) != (aiohttp.WSMsgType.CLOSE, 1012):
                    self.wrong.append(f"socket: {message}")
                self.ended["reconnect"] += 1
                return

    async def some(self) -> None:
        """Wait until eight more calls and eight more streams have ended."""
        seen = dict(self.ended)

        async def more() -> bool:
            return all(self.ended[kind] - seen[kind] >= 8 for kind in ("call", "stream"))

        await until(more, "more answers")


async def test_a_deploy_under_load_cuts_nothing_that_could_end(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate
) -> None:
    """The calls start while the app has no worker, and go on during two deploys."""
    settings = {"scale.idle_timeout_s": 0.5}
    function = await deploy_app(FASTAPI, settings, gate=gate)
    load = Load(gateway, function.name)
    async with asyncio.timeout(2 * LIMIT_S), aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(load.call("call", "/text", "ab"))
            tasks.create_task(load.call("stream", "/slow", "0123456789"))
            tasks.create_task(load.hold(session))
        for _ in range(2):
            await load.some()
            await deploy_app(FASTAPI, settings, name=function.name, gate=gate)
        await load.some()
        load.stop.set()
    assert load.wrong == []
    assert load.ended["reconnect"] >= 8
    await function.settled()

"""A plugin of pytest: the test client of Starlette calls each app through the parts of pilotflame that carry web apps.

Real are: the facts and the scope of a request, the exchange of pieces with its credit, the frames and both ends of a link over
a socket, the runner of a worker, and the classes that call an app and run its lifespan (`runtime/plugins/asgi`).

Two parts are not real. The test client calls the bridge without HTTP, so no route of the gateway runs here. And the worker
runs in the process of the test, because the apps of the tests are closures, which cannot be deployed. The bridge also raises
an app's error in the test client, because the tests expect it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from pathlib import Path
from typing import Any

import anyio
import orjson
import pytest
from pilotflame.errors import PilotflameError
from pilotflame.handlers.codec import BYTES_TYPE, JSON_TYPE, InputCodec, OutputCodec
from pilotflame.handlers.contract import Cancellation, Context
from pilotflame.handlers.handler import Handler, HandlerKind
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.exchange import WorkerExchange
from pilotflame.runtime.calls.link.frames import Frame, FrameKind
from pilotflame.runtime.calls.link.stream_credit import PIECE_BYTES
from pilotflame.runtime.calls.serving.input_stream import InputStream
from pilotflame.runtime.calls.serving.invocation import Invocation, Output
from pilotflame.runtime.calls.worker.call import Call
from pilotflame.runtime.calls.worker.loop_runner import LoopRunner
from pilotflame.runtime.plugins.asgi import messages
from pilotflame.runtime.plugins.asgi.handler import AppCaller
from pilotflame.runtime.plugins.asgi.lifespan import CONTEXT_KEY
from pilotflame.runtime.plugins.asgi.scope import HTTP, Facts
from starlette.testclient import TestClient

TIMEOUT_S = 60.0
# How long the app of a WebSocket may take.
END_S = 10.0
_MESSAGES = {messages.TEXT: "text", messages.BYTES: "bytes"}


class Worker:
    """The worker's side of one call: a runner behind a link."""

    def __init__(self, sock: socket.socket, caller: AppCaller, tasks: asyncio.TaskGroup) -> None:
        self.error: BaseException | None = None
        self._caller, self._link = caller, Link(sock)
        handler = Handler(
            self._call, HandlerKind.ASYNC, InputCodec(None), OutputCodec(None), dialect="asgi", exchanges=True
        )
        self._runner = LoopRunner(handler, Path(), self._link, 1, lambda: None, tasks)
        self._link.bind(self._on_frame, lambda: None)

    async def _call(self, event: Any, context: Context) -> Any:
        try:
            return await self._caller.call(event, context)
        except BaseException as error:
            self.error = error
            raise

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind in (FrameKind.INPUT, FrameKind.INPUT_END):
            self._runner.feed(frame.channel, frame.payload, last=frame.kind == FrameKind.INPUT_END)
        elif frame.kind == FrameKind.MORE:
            self._runner.grant(frame.channel, int(frame.json()["count"]))
        elif frame.kind == FrameKind.CANCEL:
            self._runner.cancel(frame.channel)
        elif frame.kind == FrameKind.INVOKE:
            head, cancellation = orjson.loads(frame.head), Cancellation()
            exchange = WorkerExchange(self._link, frame.channel, follows=head["exchange"])
            context = Context(
                "app", "r1", invocation_id=head["id"], extra=head["extra"], cancellation=cancellation,
                channel=frame.channel, exchange=exchange,
            )  # fmt: skip
            call = Call(frame.channel, frame.payload, head["type"], context, cancellation, exchange=exchange)
            self._runner.submit(call)

    def close(self) -> None:
        self._link.close()


class Gateway:
    """The gateway's side of one call: an invocation whose frames pass over the link."""

    def __init__(self, sock: socket.socket, facts: Facts, body: bytes, *, follows: bool) -> None:
        now_s = time.monotonic()
        self.input, self._ended = InputStream(), False
        self.invocation = Invocation(
            "i1", body, now_s=now_s, deadline_s=now_s + TIMEOUT_S, hold_until_s=now_s + TIMEOUT_S,
            content_type=BYTES_TYPE, extra=facts.encode(), streaming=True, exchanges=True,
            input=self.input if follows else None,
        )  # fmt: skip
        assert self.invocation.stream is not None
        self.stream, self._link = self.invocation.stream, Link(sock)
        self._link.bind(self._on_frame, lambda: None)
        self.stream.connect(lambda count: self._link.send_json(FrameKind.MORE, 1, {"count": count}))
        self.input.connect(self._send)
        self._link.send_json(FrameKind.INVOKE, 1, self.invocation.head(now_s), body)

    def _send(self, piece: bytes, *, last: bool) -> None:
        self._link.send(FrameKind.INPUT_END if last else FrameKind.INPUT, 1, b"", piece)

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.CHUNK:
            self.stream.put(frame.payload)
        elif frame.kind == FrameKind.READ:
            self.input.grant(int(frame.json()["count"]))
        elif frame.kind == FrameKind.RESULT:
            self.invocation.end(Output(frame.payload, JSON_TYPE))
        elif frame.kind == FrameKind.ERROR:
            self.invocation.end(PilotflameError.from_wire(frame.json()))

    async def pieces(self) -> list[bytes]:
        """Return the next pieces of the output; [] at the end, also if the invocation has failed."""
        if found := await self.stream.take():
            self.stream.consumed(len(found))
            return found
        with contextlib.suppress(PilotflameError):
            payload = (await self.invocation.output).payload
            if payload and not self._ended:
                self._ended = True
                return [payload]
        return []

    def cancel(self) -> None:
        self._link.send(FrameKind.CANCEL, 1)

    def close(self) -> None:
        self._link.close()


class Bridge:
    """An app that passes each call on to another app, as a gateway and a worker do."""

    def __init__(self, app: Any) -> None:
        self._app, self._caller = app, AppCaller(app)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._live(scope, receive, send)
            return
        self._caller.lifespan.state = scope.get("state", {})
        facts = Facts(
            scope["type"], scope["http_version"] if scope["type"] == HTTP else "1.1", scope.get("method", "GET"),
            scope["scheme"], scope["raw_path"].decode(), scope["query_string"].decode(), scope["root_path"],
            scope["headers"], scope["client"], scope["server"],
        )  # fmt: skip
        if scope["type"] == HTTP:
            await self._carry_request(facts, receive, send)
        # The test client cancels the app in the turn in which its own side ends. A link needs more turns.
        elif not await self._carried(facts, receive, send):
            raise TimeoutError("the app did not end")

    async def _carried(self, facts: Facts, receive: Any, send: Any) -> bool:
        with anyio.move_on_after(END_S, shield=True):
            await self._carry_socket(facts, receive, send)
            return True
        return False

    async def _live(self, scope: Any, receive: Any, send: Any) -> None:
        lifespan = self._caller.lifespan
        lifespan.state = scope.get("state", {})
        await receive()
        await lifespan.start(Context("app", "r1"))
        # The tests compare the whole state.
        lifespan.state.pop(CONTEXT_KEY, None)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.to_thread(lifespan.stop)
        await send({"type": "lifespan.shutdown.complete"})

    async def _carry_request(self, facts: Facts, receive: Any, send: Any) -> None:
        first = await receive()
        follows = first.get("more_body", False) or len(first.get("body", b"")) > PIECE_BYTES
        async with _ends(facts, self._caller, first.get("body", b""), follows=follows) as (
            gateway,
            worker,
            tasks,
        ):
            sending = tasks.create_task(self._send_body(gateway, first, receive)) if follows else None
            while pieces := await gateway.pieces():
                for piece in map(messages.decode_response, pieces):
                    if piece.status:
                        headers = messages.decode_head(piece.head)
                        await send(
                            {"type": "http.response.start", "status": piece.status, "headers": headers}
                        )
                    await send(
                        {"type": "http.response.body", "body": piece.body, "more_body": not piece.last}
                    )
            if sending is not None:
                sending.cancel()
        if worker.error is not None:
            raise worker.error

    async def _send_body(self, gateway: Gateway, message: Any, receive: Any) -> None:
        while True:
            for part in messages.parts(message.get("body", b""), PIECE_BYTES) if message.get("body") else ():
                if not await gateway.input.put(part):
                    return
            if message["type"] == "http.disconnect":
                gateway.cancel()
                return
            if not message.get("more_body", False):
                break
            message = await receive()
        await gateway.input.put(b"", last=True)

    async def _carry_socket(self, facts: Facts, receive: Any, send: Any) -> None:
        await receive()
        joined = messages.MessageParts(1 << 30)
        async with _ends(facts, self._caller, b"", follows=True) as (gateway, worker, tasks):
            sending = tasks.create_task(self._send_messages(gateway, receive))
            while pieces := await gateway.pieces():
                for piece in pieces:
                    if (found := joined.add(piece)) is not None:
                        await self._pass_message(*found, send)
            sending.cancel()
        if worker.error is not None:
            raise worker.error

    async def _send_messages(self, gateway: Gateway, receive: Any) -> None:
        while (message := await receive())["type"] == "websocket.receive":
            text = message.get("text")
            kind, data = (
                (messages.TEXT, text.encode()) if text is not None else (messages.BYTES, message["bytes"])
            )
            for part in messages.encode_message(kind, data):
                await gateway.input.put(part)
        close = messages.encode_close(message.get("code", 1005), message.get("reason") or "")
        await gateway.input.put(close, last=True)

    async def _pass_message(self, kind: int, data: bytes, send: Any) -> None:
        if kind == messages.ACCEPT:
            subprotocol, headers = messages.decode_accept(data)
            await send({"type": "websocket.accept", "subprotocol": subprotocol or None, "headers": headers})
        elif kind == messages.CLOSE:
            code, reason = messages.decode_close(data)
            await send({"type": "websocket.close", "code": code, "reason": reason})
        elif kind == messages.DENY:
            piece = messages.decode_response(data)
            if piece.status:
                start = {"status": piece.status, "headers": messages.decode_head(piece.head)}
                await send({"type": "websocket.http.response.start", **start})
            await send(
                {"type": "websocket.http.response.body", "body": piece.body, "more_body": not piece.last}
            )
        else:
            value = data.decode() if kind == messages.TEXT else data
            await send({"type": "websocket.send", _MESSAGES[kind]: value})


@contextlib.asynccontextmanager
async def _ends(facts: Facts, caller: AppCaller, body: bytes, *, follows: bool) -> Any:
    """Connect both sides of a call by a link over a socket."""
    ours, theirs = socket.socketpair()
    gateway = worker = None
    try:
        async with asyncio.TaskGroup() as tasks:
            worker = Worker(theirs, caller, tasks)
            gateway = Gateway(ours, facts, b"" if follows else body, follows=follows)
            yield gateway, worker, tasks
    finally:
        for end in (gateway, worker):
            if end is not None:
                end.close()


@pytest.fixture(autouse=True)
def _bridged(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let test clients of the backend asyncio call apps through a bridge."""
    before = TestClient.__init__

    def made(self: TestClient, app: Any, *arguments: Any, **how: Any) -> None:
        before(self, Bridge(app), *arguments, **how)
        self.app = app

    monkeypatch.setattr(TestClient, "__init__", made)

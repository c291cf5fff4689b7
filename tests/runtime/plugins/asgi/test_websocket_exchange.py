"""WebSockets of web apps over real HTTP: handshakes, messages and ends in both directions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import WSMsgType
from live import LIMIT_S, Function, Gate, Gateway, gateway_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOCKETS = """
import asyncio, gate

async def app(scope, receive, send):
    if scope["type"] != "websocket":
        raise RuntimeError
    case = scope["path"].removeprefix(scope["root_path"])
    assert (await receive())["type"] == "websocket.connect"
    if case == "/denied":
        return await send({"type": "websocket.close", "code": 1008})
    if case == "/response":
        await send({"type": "websocket.http.response.start", "status": 401, "headers": [(b"x-why", b"no")]})
        await send({"type": "websocket.http.response.body", "body": b"first ", "more_body": True})
        return await send({"type": "websocket.http.response.body", "body": b"sign in"})
    if case == "/response-in-turns":
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        for part in (b"first ", b"sign "):
            await send({"type": "websocket.http.response.body", "body": part, "more_body": True})
            await gate.wait_async("part")
        return await send({"type": "websocket.http.response.body", "body": b"in"})
    if case == "/response-without-end":
        await send({"type": "websocket.http.response.start", "status": 401, "headers": []})
        return await send({"type": "websocket.http.response.body", "body": b"first ", "more_body": True})
    if case == "/denied-and-receives":
        await send({"type": "websocket.close", "code": 1008})
        return gate.say(f"told {(await receive())['code']}")
    if case == "/unanswered":
        return
    if case == "/fails-early":
        raise ValueError("early")
    chosen = scope["subprotocols"][-1] if scope["subprotocols"] else None
    await send({"type": "websocket.accept", "subprotocol": chosen, "headers": [(b"x-mine", b"1"), (b"set-cookie", b"a=1")]})
    if case == "/closes":
        return await send({"type": "websocket.close", "code": 4001, "reason": "enough"})
    if case == "/closes-and-receives":
        waiting = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await send({"type": "websocket.close", "code": 4001})
        return gate.say(f"told {(await waiting)['code']}")
    if case == "/returns":
        return
    if case == "/fails":
        raise ValueError("late")
    if case == "/flood":
        try:
            while True:
                await send({"type": "websocket.send", "bytes": b"x" * 50_000})
        except OSError:
            gate.say("gone")
            raise
    while True:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            gate.say(f"left {message['code']} {message.get('reason', '')}".strip())
            return
        if case == "/waits":
            await gate.wait_async("waits")
        await send({"type": "websocket.send", "text": message.get("text"), "bytes": message.get("bytes")})
"""

ECHOES = """
async def app(scope, receive, send):
    if scope["type"] != "websocket":
        raise RuntimeError
    await receive()
    await send({"type": "websocket.accept"})
    while (message := await receive())["type"] != "websocket.disconnect":
        await send({"type": "websocket.send", "bytes": message["bytes"]})
"""


@pytest_asyncio.fixture(loop_scope="module")
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


class Sockets:
    """The WebSockets of a function, as a caller opens them."""

    def __init__(self, gateway: Gateway, function: Function, session: aiohttp.ClientSession) -> None:
        self.function, self._session = function, session
        self._base = f"{gateway.url}/asgi/{function.name}"

    def open(self, path: str = "/echo", **how: Any) -> Any:
        return self._session.ws_connect(self._base + path, max_msg_size=0, **how)

    async def denial(self, path: str) -> tuple[int, str]:
        """Return the status and the body of a denied handshake. A WebSocket client would close the connection after the status."""
        headers = {
            "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
        }  # fmt: skip
        async with (
            asyncio.timeout(LIMIT_S),
            self._session.get(self._base + path, headers=headers) as response,
        ):
            return response.status, await response.text()

    async def refused(self, path: str) -> aiohttp.WSServerHandshakeError:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            async with self.open(path):
                pass
        return caught.value


@pytest_asyncio.fixture(loop_scope="module")
async def sockets(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, session: aiohttp.ClientSession
) -> Sockets:
    return Sockets(gateway, await deploy_app(SOCKETS, gate=gate), session)


async def received(socket: aiohttp.ClientWebSocketResponse) -> aiohttp.WSMessage:
    async with asyncio.timeout(LIMIT_S):
        return await socket.receive()


async def test_messages_pass_in_both_directions(sockets: Sockets) -> None:
    async with sockets.open() as socket:
        for text in ("", "é", "x" * 300_000):
            await socket.send_str(text)
            message = await received(socket)
            assert (message.type, message.data) == (WSMsgType.TEXT, text)
        await socket.send_bytes(b"\xff" * 100_000)
        assert (await received(socket)).data == b"\xff" * 100_000
        for number in range(500):
            await socket.send_str(str(number))
        assert [(await received(socket)).data for _ in range(500)] == [str(number) for number in range(500)]


async def test_an_app_chooses_a_subprotocol_and_headers(sockets: Sockets) -> None:
    async with sockets.open(protocols=("chat", "json"), headers={"X-Request-Id": "r-1"}) as socket:
        assert socket.protocol == "json"
        headers = socket._response.headers
        assert headers["x-mine"] == "1"
        assert headers["set-cookie"] == "a=1"
        assert headers["x-request-id"] == "r-1"
        assert headers["x-worker-id"]


async def test_a_caller_closes_with_a_code(sockets: Sockets, gate: Gate) -> None:
    async with sockets.open() as socket:
        await socket.send_str("last")
        await socket.close(code=4002, message=b"bye")
    await gate.next("left 4002 bye")
    await sockets.function.settled(ready=1, in_flight=0)


async def test_a_caller_that_vanishes_is_a_disconnect(sockets: Sockets, gate: Gate) -> None:
    async with sockets.open() as socket:
        transport = socket._conn.transport
        transport.abort()
        await gate.next("left 1006")
    await sockets.function.settled(ready=1, in_flight=0)
    assert not [line for line in await sockets.function.lines() if line["level"] == "error"]


@pytest.mark.parametrize(
    ("path", "code", "reason"), [("/closes", 4001, "enough"), ("/returns", 1000, ""), ("/fails", 1011, "")]
)
async def test_an_app_closes(sockets: Sockets, path: str, code: int, reason: str) -> None:
    async with sockets.open(path) as socket:
        message = await received(socket)
        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, code, reason)


async def test_an_app_denies_the_handshake(sockets: Sockets) -> None:
    assert (await sockets.refused("/denied")).status == 403
    refused = await sockets.refused("/response")
    assert refused.status == 401
    assert refused.headers is not None
    assert refused.headers["x-why"] == "no"
    for path in ("/unanswered", "/fails-early"):
        assert (await sockets.refused(path)).status == 500
    await sockets.function.settled(ready=1, in_flight=0)


async def test_an_app_denies_the_handshake_in_several_turns(sockets: Sockets, gate: Gate) -> None:
    async with asyncio.TaskGroup() as tasks:
        denied = tasks.create_task(sockets.denial("/response-in-turns"))
        for _ in range(2):
            (await gate.next("part")).go()
    assert denied.result() == (401, "first sign in")
    # The app ends before its response: the caller must not wait for the rest.
    with pytest.raises(aiohttp.ClientError):
        await sockets.denial("/response-without-end")
    await sockets.function.settled(ready=1, in_flight=0)


async def test_an_app_that_waits_after_its_own_close_gets_a_disconnect(sockets: Sockets, gate: Gate) -> None:
    assert (await sockets.refused("/denied-and-receives")).status == 403
    await gate.next("told 1008")
    async with sockets.open("/closes-and-receives") as socket:
        assert (await received(socket)).data == 4001
        await gate.next("told 4001")
    await sockets.function.settled(ready=1, in_flight=0)


async def test_a_message_that_is_too_long_closes(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, session: aiohttp.ClientSession
) -> None:
    function = await deploy_app(SOCKETS, {"max_body_bytes": 100_000}, gate=gate)
    async with Sockets(gateway, function, session).open() as socket:
        await socket.send_bytes(b"x" * 100_001)
        assert (await received(socket)).data == 1009
    await gate.next("left 1006")


async def test_a_silent_socket_ends_after_the_time_limit(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, session: aiohttp.ClientSession
) -> None:
    function = await deploy_app(SOCKETS, {"timeout_s": 1.0}, gate=gate)
    began_s = asyncio.get_running_loop().time()
    async with Sockets(gateway, function, session).open() as socket:
        # Each message starts the time limit again.
        for _ in range(4):
            await asyncio.sleep(0.4)
            await socket.send_str("x")
            assert (await received(socket)).data == "x"
        message = await received(socket)
    assert (message.type, message.data) == (WSMsgType.CLOSE, 1001)
    assert asyncio.get_running_loop().time() - began_s > 2.5
    await gate.next("left 1006")
    await function.settled(ready=1, in_flight=0)


async def test_a_caller_that_reads_nothing_stops_the_app(sockets: Sockets, gate: Gate) -> None:
    async with sockets.open("/flood") as socket:
        await received(socket)
        socket._conn.transport.abort()
        await gate.next("gone")


async def test_sockets_and_requests_share_workers(sockets: Sockets) -> None:
    opened = [await sockets.open().__aenter__() for _ in range(30)]
    for socket in opened:
        await socket.send_str("hi")
    assert {(await received(socket)).data for socket in opened} == {"hi"}
    assert (await sockets.function.status())["in_flight"] == 30
    for socket in opened:
        await socket.close()
    await sockets.function.settled(ready=1, in_flight=0)


async def test_a_new_revision_sends_sockets_away_and_cuts_no_answer(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, session: aiohttp.ClientSession
) -> None:
    function = await deploy_app(SOCKETS, gate=gate)
    sockets = Sockets(gateway, function, session)
    async with sockets.open() as socket:
        await socket.send_str("x")
        await received(socket)
        deploying = asyncio.create_task(deploy_app(SOCKETS, name=function.name, gate=gate))
        message = await received(socket)
        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, 1012, "service restart")
        await gate.next("left 1012 service restart")
        await deploying
    async with sockets.open() as socket:
        await socket.send_str("again")
        assert (await received(socket)).data == "again"


async def test_a_socket_brings_an_app_back_from_zero(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, session: aiohttp.ClientSession
) -> None:
    function = await deploy_app(SOCKETS, {"scale.idle_timeout_s": 0.2}, gate=gate)
    for _ in range(2):
        await function.settled()
        async with Sockets(gateway, function, session).open() as socket:
            await socket.send_str("x")
            assert (await received(socket)).data == "x"
            await asyncio.sleep(0.5)
            # An open WebSocket keeps its worker, although no message came for longer than the idle timeout.
            assert (await function.status())["workers"]["ready"] == 1


async def test_a_socket_ends_with_the_key_of_its_caller(state: Any, session: aiohttp.ClientSession) -> None:
    async with gateway_here(state, auth="always") as closed, closed.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "a", "scopes": ["invoke"]})).json()
        folder = state.parent / "sockets"
        folder.mkdir()
        (folder / "app.py").write_text(SOCKETS.replace("import asyncio, gate", "import asyncio"))
        order = {"path": str(folder), "overrides": {"name": "sockets", "asgi": "app:app"}}
        assert (await home.post("/v1/functions", json=order)).status_code == 201
        key = {"Authorization": f"Bearer {made['key']}"}
        async with session.ws_connect(f"{closed.url}/asgi/sockets/echo", headers=key) as socket:
            await socket.send_str("x")
            assert (await received(socket)).data == "x"
            assert (await home.delete(f"/v1/keys/{made['id']}")).status_code == 200
            assert (await received(socket)).data == 1008
        with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
            await session.ws_connect(f"{closed.url}/asgi/sockets/echo", headers=key)


async def test_the_end_of_the_gateway_sends_sockets_away(
    state: Any, gate: Gate, session: aiohttp.ClientSession
) -> None:
    async with asyncio.TaskGroup() as tasks, gateway_here(state, drain_s=20.0) as own:
        function = await own.deploy(None, {"asgi": "app:app"}, files={"app.py": SOCKETS}, gate=gate)
        socket = await Sockets(own, function, session).open()
        await socket.send_str("x")
        assert (await received(socket)).data == "x"
        leaving = tasks.create_task(received(socket))
    assert (leaving.result().data, leaving.result().extra) == (1012, "service restart")
    await gate.next("left 1012 service restart")


async def test_messages_are_not_compressed(sockets: Sockets) -> None:
    """The gateway refuses compression, because a short compressed message may unpack to a thousand times its size."""
    async with sockets.open(compress=15) as socket:
        assert not socket.compress
        await socket.send_str("x" * 1000)
        assert (await received(socket)).data == "x" * 1000


async def test_unfinished_messages_of_one_caller_leave_room_for_others(
    state: Any, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pilotflame.runtime.front.http.incoming_bodies.IncomingBodies.__init__.__defaults__", (4 << 20,)
    )
    async with gateway_here(state, drain_s=1.0) as gateway, gateway.at_home() as home:
        deployed = await gateway.send(None, {"asgi": "app:app"}, files={"app.py": ECHOES}, name="echoes")
        assert deployed.status_code == 201, deployed.text
        greedy, other = [
            {"Authorization": f"Bearer {(await home.post('/v1/keys', json={'name': name})).json()['key']}"}
            for name in ("greedy", "other")
        ]
        sockets = Sockets(gateway, gateway.function("echoes"), session)
        # The beginning of a message: a frame of 1 MiB without the flag FIN, so more frames must follow.
        part = b"\x02\xff" + (1 << 20).to_bytes(8, "big") + bytes(4) + bytes(1 << 20)
        async with contextlib.AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(sockets.open("/", headers=greedy)) for _ in range(6)]
            for one in opened:
                # Write to the transport, because aiohttp's client sends only whole messages.
                one._writer.transport.write(part)
            closed = [asyncio.create_task(one.receive()) for one in opened]
            async with asyncio.timeout(LIMIT_S):
                await asyncio.wait(closed, return_when=asyncio.FIRST_COMPLETED)
            codes = {task.result().data for task in closed if task.done()}
            assert codes == {aiohttp.WSCloseCode.TRY_AGAIN_LATER}
            async with sockets.open("/", headers=other) as socket:
                await socket.send_bytes(bytes(200 << 10))
                assert len((await received(socket)).data) == 200 << 10
            for task in closed:
                task.cancel()


CHOOSES = """
async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        raise RuntimeError("no lifespan")
    await receive()
    await send({"type": "websocket.accept", "subprotocol": "superchat"})
    await receive()
"""


@pytest.mark.parametrize(("offered", "told"), [((), "none"), (("chat", "json"), "chat, json")])
async def test_a_subprotocol_that_is_not_offered_is_in_the_log(
    gateway: Gateway, deploy_app: Callable[..., Any], offered: tuple[str, ...], told: str
) -> None:
    function = await deploy_app(CHOOSES)
    url = f"{gateway.url}/asgi/{function.name}/"
    async with aiohttp.ClientSession() as session, session.ws_connect(url, protocols=offered) as socket:
        assert socket.protocol is None
        await function.logged(f"The app accepts the subprotocol 'superchat', but its client offers {told}")

"""The headers that keep pages of functions apart from the gateway's pages, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import pytest_asyncio
from live import Function, Gateway, gateway_here, short_folder
from pilotflame.runtime.front.http.page_isolation import ORIGIN_WIDE
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings
from pilotflame.runtime.startup.server import serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICY = "Content-Security-Policy"
# Answers requests and WebSockets with the headers that the query contains.
APP = """
from urllib.parse import parse_qsl

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        raise RuntimeError("no lifespan")
    headers = [(name.encode(), value.encode("latin-1")) for name, value in parse_qsl(scope["query_string"].decode(), encoding="latin-1")]
    if scope["type"] == "websocket":
        await receive()
        if scope["path"].endswith("/deny"):
            await send({"type": "websocket.http.response.start", "status": 403, "headers": headers})
            await send({"type": "websocket.http.response.body"})
            return
        await send({"type": "websocket.accept", "headers": headers})
        await send({"type": "websocket.close"})
        return
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"<p>"})
"""
WIDE = [(name, "x") for name in ORIGIN_WIDE]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, app_hosts="*.apps.test") as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(gateway: Gateway) -> Function:
    return await gateway.deploy(None, {"asgi": "app:app"}, files={"app.py": APP}, name="app")


async def sent(
    gateway: Gateway, headers: list[tuple[str, str]], host: str = "", path: str = "/", **more: str
) -> httpx.Response:
    """Call the app, and return its response, which has `headers`. The URL is at `host`, or below /asgi/app if `host` is ""."""
    named = {"Host": f"{host}:{gateway.address[1]}"} if host else {}
    url = path if host else f"/asgi/app{path}"
    query = urlencode(headers, encoding="latin-1")
    return await gateway.client.get(f"{url}?{query}", headers=named | more)


async def test_answers_below_a_path_are_sandboxed(gateway: Gateway, app: Function) -> None:
    own = "default-src 'self'"
    for headers, policies in (([], ["sandbox"]), ([(POLICY, own)], [own, "sandbox"])):
        response = await sent(gateway, headers)
        assert response.status_code == 200
        assert sorted(response.headers.get_list(POLICY)) == sorted(policies)
        for host in ("app.localhost", "app.apps.test"):
            response = await sent(gateway, headers, host)
            assert response.headers.get_list(POLICY) == policies[:-1]


async def test_answers_of_all_routes_but_the_gateways_own_pages_are_sandboxed(
    gateway: Gateway, app: Function
) -> None:
    function = await gateway.deploy("def handler(event):\n    return event", name="echo")
    # The form of a web page sends Origin, so the answer may become a page and is sandboxed.
    response = await function.call(1, Origin=gateway.url)
    assert (response.status_code, response.headers[POLICY]) == (200, "sandbox")
    for header in ({}, {"Prefer": "handling=lenient"}):
        assert POLICY not in (await function.call(1, **header)).headers
    for path in ("/asgi/none/", "/nothing", "/v1/functions", "/", "/healthz", "/asgi/app"):
        assert (await gateway.client.get(path)).headers[POLICY] == "sandbox", path
    for path in ("/console", "/console/main.js", "/docs", "/docs/page.js"):
        response = await gateway.client.get(path)
        assert "frame-ancestors 'none'" in response.headers[POLICY]
        assert "sandbox" not in response.headers[POLICY]
        assert response.headers["Cross-Origin-Opener-Policy"] == "same-origin"


async def test_an_app_decides_nothing_about_other_paths(gateway: Gateway, app: Function) -> None:
    response = await sent(gateway, [("X-Mine", "\xe9"), *WIDE])
    assert not {name.lower() for name in ORIGIN_WIDE} & set(response.headers)
    assert (b"X-Mine", b"\xe9") in response.headers.raw
    response = await sent(gateway, WIDE, "app.localhost")
    # At its own host name, the app may send headers for its whole origin, except Clear-Site-Data, which also affects other apps.
    assert {name.lower() for name in ORIGIN_WIDE} - set(response.headers) == {"clear-site-data"}


BELOW = [
    "a=1; Path=/asgi/app", "a=1; path=/asgi/app/x; HttpOnly", "a=1", "a=1; Path=", "a=1; Domain=", "a=1; Path=x", "a=\xe9; Secure",
]  # fmt: skip
BEYOND = [
    "a=1; Path=/", "a=1; path = /asgi", "a=1; Path=/asgi/app; PATH=/", "a=1; Path=/asgi/apple", "a=1; Path=/asgi/other/",
    "a=1; Path=/console", "a=1;Path=//asgi/app", "a=1; Path=/ASGI/APP",
]  # fmt: skip
PARENTS = [
    "a=1; Domain=localhost",
    "a=1; domain=.apps.test",
    "a=1; Domain=test",
    "a=1; Path=/asgi/app; DOMAIN= 127.0.0.1",
]


def cookies(response: httpx.Response) -> list[str]:
    return [value.decode("latin-1") for name, value in response.headers.raw if name.lower() == b"set-cookie"]


async def test_cookies_stay_with_their_function(gateway: Gateway, app: Function) -> None:
    every = [("Set-Cookie", cookie) for cookie in (*BELOW, *BEYOND, *PARENTS)]
    assert cookies(await sent(gateway, every)) == BELOW
    assert cookies(await sent(gateway, every, path="/login/")) == BELOW
    own = ["a=1; Domain=app.localhost", "a=1; Domain=.APP.localhost"]
    every += [("Set-Cookie", cookie) for cookie in own]
    assert cookies(await sent(gateway, every, "app.localhost")) == [*BELOW, *BEYOND, *own]
    assert cookies(await sent(gateway, every, "app.apps.test")) == [*BELOW, *BEYOND]


@pytest.mark.parametrize("end", ["", "deny"])
async def test_handshakes_of_websockets_set_no_other_cookies(
    gateway: Gateway, app: Function, end: str
) -> None:
    query = urlencode([("Set-Cookie", cookie) for cookie in (*BELOW[:3], *BEYOND, *PARENTS)] + WIDE)
    request = (
        f"GET /asgi/app/{end}?{query} HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(request.encode())
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    writer.close()
    assert head.startswith("http/1.1 403" if end else "http/1.1 101")
    assert [line for line in head.split("\r\n") if line.startswith("set-cookie")] == [
        f"set-cookie: {cookie.lower()}" for cookie in BELOW[:3]
    ]
    assert not [
        line for line in head.split("\r\n") if line.partition(":")[0] in {n.lower() for n in ORIGIN_WIDE}
    ]


async def test_the_log_names_the_host_once(gateway: Gateway, app: Function) -> None:
    function = await gateway.deploy(None, {"asgi": "app:app"}, files={"app.py": APP}, name="told")
    path, html = f"/asgi/{function.name}/", {"Accept": "text/html,*/*"}

    async def said() -> list[dict[str, Any]]:
        return [line for line in await function.lines() if "told.apps.test" in line["text"]]

    await gateway.client.get(path)
    await gateway.client.get("/", headers={"Host": "told.localhost", **html})
    assert await said() == []
    for _ in range(2):
        await gateway.client.get(path, headers=html)
    [line] = await said()
    assert (line["level"], "PILOTFLAME_APP_HOSTS" in line["text"]) == ("warning", True)


async def test_only_the_app_is_at_a_host_name(gateway: Gateway, app: Function) -> None:
    """The gateway has no keys and listens on loopback, so it refuses other host names."""
    for path in ("/v1/functions", "/healthz", "/console", "/asgi/app/", "//v1/functions", "/../v1/functions"):
        response = await gateway.client.get(path, headers={"Host": "app.localhost:1"})
        assert (response.status_code, response.text) == (200, "<p>"), path
    for host in ("none.localhost", "none.apps.test", "a.b.localhost", "x/../../v1/functions?.localhost"):
        for path in ("/healthz", "/console", "/v1/functions"):
            assert (await gateway.client.get(path, headers={"Host": host})).status_code in (400, 404), (
                host,
                path,
            )


async def test_a_function_that_is_served_alone_has_no_neighbours(state: Any) -> None:
    async with (
        serve(GatewaySettings(port=0, state_dir=state), FunctionSettings(name="app")) as server,
        httpx.AsyncClient(base_url=server.url) as client,
    ):
        assert (await client.get("/healthz")).status_code == 200
        assert POLICY not in (await client.get("/nothing")).headers

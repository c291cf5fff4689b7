"""The page of a hostile function in a real browser: what it sends to the gateway, to other functions, and to the console."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from browser import chromium
from live import LIMIT_S, Gateway, gateway_here, short_folder

pytest.importorskip("playwright")
from playwright.async_api import Browser, Page

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Answers `*.js` with an empty script, and other paths with a page whose script sets the title. Sends cookies for other hosts and
# paths.
EVIL = """
async def app(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError
    script = scope["path"].endswith(".js")
    headers = [(b"content-type", b"text/javascript" if script else b"text/html"), (b"service-worker-allowed", b"/"),
               (b"set-cookie", b"tossed=1; Path=/"), (b"set-cookie", b"wide=1; Domain=localhost; Path=/")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if script else b"<script>document.title = 'ran'</script>"})
"""
# An app that counts the requests and WebSockets that reach it, and answers all of them. `/calls` returns the count.
VICTIM = """
calls = 0
async def app(scope, receive, send):
    global calls
    if scope["type"] == "websocket":
        calls += 1
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "secret"})
        return
    if scope["type"] != "http":
        raise RuntimeError
    if scope["path"].endswith("/calls"):
        body = str(calls).encode()
    else:
        calls += 1
        body = b"secret"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"access-control-allow-origin", b"*")]})
    await send({"type": "http.response.body", "body": body})
"""
SHOP = """
from urllib.parse import parse_qs
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

app = FastAPI(title="A shop")

@app.get("/", response_class=HTMLResponse)
async def page():
    return "<form method=post action=/login><input name=user value=Ada><button>Login</button></form>"

@app.post("/login")
async def login(request: Request):
    user = parse_qs((await request.body()).decode())["user"][0]
    response = RedirectResponse("/me", 303)
    response.set_cookie("session", user, httponly=True)
    return response

@app.get("/me")
async def me(request: Request):
    return request.cookies.get("session")
"""
# Stands in for Swagger UI, which FastAPI's page loads from the internet.
SWAGGER = """
window.SwaggerUIBundle = Object.assign(
  (how) => fetch(how.url).then((found) => found.json()).then((found) => { document.title = "docs of " + found.info.title; }),
  { presets: {}, SwaggerUIStandalonePreset: {} });
"""
# Tries every way of sending something from a page, and returns what it could read. No attempt may take longer than a second.
ATTACK = """
async ([places, routes]) => {
  const read = [], attempts = [];
  const frame = (begin) => new Promise((done) => {
    const inner = document.createElement("iframe");
    inner.name = "f" + document.body.childElementCount;
    inner.onload = () => { try { read.push(inner.contentDocument.body.innerText); } catch {} done(); };
    document.body.append(inner);
    begin(inner);
  });
  const form = (method, action, enctype, name) => frame((inner) => {
    const made = document.createElement("form"), field = document.createElement("input");
    Object.assign(made, { method, action, enctype, target: inner.name });
    field.name = name;
    made.append(field);
    document.body.append(made);
    made.submit();
  });
  const script = (url) => new Promise((done) => {
    const made = document.createElement("script");
    made.onload = () => { read.push("script " + url); done(); };
    made.onerror = done;
    made.src = url;
    document.body.append(made);
  });
  const socket = (url) => new Promise((done) => {
    const made = new WebSocket(url);
    made.onmessage = (message) => { read.push(message.data); done(); };
    made.onopen = () => read.push("open " + url);
    made.onclose = done;
  });
  const popup = (url) => new Promise((done) => {
    const made = window.open(url);
    setTimeout(() => {
      try { read.push(made.document.title); } catch {}
      made?.close();
      done();
    }, 500);
  });
  for (const place of places) {
    for (const [method, path, body] of routes) {
      const url = "http://" + place + path;
      for (const [mode, type] of [["cors", "application/json"], ["cors", "text/plain"], ["no-cors", "text/plain"]])
        attempts.push(fetch(url, { method, body, mode, credentials: "include", headers: { "Content-Type": type } })
          .then((found) => found.text()).then((text) => read.push(text)));
      if (method === "GET") attempts.push(frame((inner) => { inner.src = url; }), script(url));
      else attempts.push(form(method, url, "text/plain", body), form(method, url, "multipart/form-data", body));
      attempts.push(socket("ws://" + place + path));
    }
    if (!place.startsWith("victim")) attempts.push(popup("http://" + place + "/console"));
    attempts.push(navigator.serviceWorker.register("http://" + place + "/worker.js", { scope: "/" }).then(() => read.push(place)));
  }
  document.cookie = "tossed=2; Domain=localhost; Path=/";
  const patient = (work) => Promise.race([work, new Promise((done) => setTimeout(done, 1000))]);
  await Promise.allSettled(attempts.map(patient));
  return read.filter((text) => text);
}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """Yield a gateway with the functions. At first, it has no keys."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=1.0) as found:
            allowed = f"http://evil.localhost:{found.address[1]}"
            for name, source, settings in (
                ("evil", EVIL, {}), ("victim", VICTIM, {}), ("shop", SHOP, {}), ("shared", VICTIM, {"cors.origins": allowed}),
            ):  # fmt: skip
                await found.deploy(None, {"asgi": "app:app", **settings}, files={"app.py": source}, name=name)
            yield found


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[False, True], ids=["without keys", "with a key"]
)
async def headers(gateway: Gateway, request: Any) -> dict[str, str]:
    """Return the headers of the owner's requests. With the second parameter, make the gateway's first key."""
    if not request.param:
        return {}
    made = (await gateway.client.post("/v1/keys", json={"name": "owner", "scopes": ["admin"]})).json()
    return {"Authorization": f"Bearer {made['key']}"}


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, gateway: Gateway, headers: dict[str, str]) -> AsyncIterator[Page]:
    """Yield a page of a new profile. All its requests have the owner's key, as if a proxy in front of the gateway added the key."""
    gateway.client.headers.update(headers)
    context = await browser.new_context(extra_http_headers=headers)
    found = await context.new_page()
    found.set_default_timeout(LIMIT_S * 1000)
    try:
        yield found
    finally:
        await context.close()


async def state_of(client: httpx.AsyncClient) -> Any:
    keys = [key["name"] for key in (await client.get("/v1/keys")).json()["keys"]]
    functions = (await client.get("/v1/functions")).json()["functions"]
    return (
        keys,
        [(one["name"], one["revision"]) for one in functions],
        (await client.get("/asgi/victim/calls")).text,
    )


async def test_a_page_at_a_host_name_gets_nothing_of_others(gateway: Gateway, page: Page) -> None:
    before, port = await state_of(gateway.client), gateway.address[1]
    assert before[2] == "0"
    order = '{"name": "stolen", "scopes": ["admin"], "path": "/tmp"}'
    routes = [
        ["POST", "/v1/keys", order], ["POST", "/v1/functions", order], ["GET", "/v1/functions", None],
        ["GET", "/v1/console?follow=1", None], ["GET", "/console", None], ["POST", "/invoke/victim", "1"],
        ["GET", "/asgi/victim/", None], ["POST", "/asgi/victim/", "1"],
    ]  # fmt: skip
    await page.goto(f"http://evil.localhost:{port}/")
    assert await page.title() == "ran"
    places = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "victim.localhost")]
    async with asyncio.timeout(LIMIT_S):
        assert await page.evaluate(ATTACK, [places, routes]) == []
    assert await state_of(gateway.client) == before
    # The CORS settings of this function allow the page.
    shared = f"fetch('http://shared.localhost:{port}/').then((found) => found.text())"
    assert await page.evaluate(shared) == "secret"
    await page.goto(f"{gateway.url}/console")
    await page.get_by_role("link", name="victim").wait_for()
    for url in (gateway.url, f"http://localhost:{port}", f"http://victim.localhost:{port}"):
        assert await page.context.cookies(url) == []


async def test_a_page_below_a_path_has_no_scripts_and_no_origin(gateway: Gateway, page: Page) -> None:
    await page.goto(f"{gateway.url}/asgi/evil/")
    assert (await page.title(), await page.evaluate("origin")) == ("", "null")
    refused = "try { navigator.serviceWorker.register('/worker.js') } catch (error) { error.name }"
    assert await page.evaluate(refused) == "SecurityError"
    assert await page.context.cookies(gateway.url) == []


async def test_an_app_works_at_its_own_host_name(gateway: Gateway, page: Page) -> None:
    url = f"http://shop.localhost:{gateway.address[1]}"

    async def stand_in(route: Any) -> None:
        await route.fulfill(body=SWAGGER if route.request.resource_type == "script" else "")

    await page.route(lambda asked: not asked.startswith(url), stand_in)
    await page.goto(f"{url}/docs")
    await page.wait_for_function("document.title === 'docs of A shop'")
    await page.goto(url)
    await page.get_by_role("button", name="Login").click()
    await page.wait_for_url(f"{url}/me")
    assert await page.evaluate("fetch('/me').then((found) => found.json())") == "Ada"

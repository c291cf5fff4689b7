"""The page at /docs, the root, and what all responses have in common."""

from __future__ import annotations

import asyncio
import json
import re
import shutil

import httpx
import pytest
from live import Gateway, gateway_here
from pilotflame._version import __version__
from pilotflame.runtime.plugins.predictions.cog_version import COG_VERSION

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event: int) -> int:\n    return event"
# Runs the page's script in Node, with stand-ins for the parts of the DOM that the script uses. Prints what a user would see.
BROWSER = r"""
class Element {
  constructor(name) {
    Object.assign(this, { name, children: [], listeners: {}, dataset: {}, attributes: {}, value: "", hidden: false, className: "" });
  }
  append(...more) { this.children.push(...more.flat()); }
  replaceChildren(...more) { this.children = more; }
  setAttribute(key, value) { this.attributes[key] = value; }
  addEventListener(event, call) { this.listeners[event] = call; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((one) => one.textContent ?? String(one)).join(""); }
  querySelectorAll(name) {
    const inner = this.children.filter((one) => one instanceof Element);
    return inner.flatMap((one) => [...(one.name === name ? [one] : []), ...one.querySelectorAll(name)]);
  }
}
const ids = Object.fromEntries(["version", "key", "filter", "status", "operations"].map((id) => [id, new Element(id)]));
globalThis.document = {
  createElement: (name) => new Element(name),
  getElementById: (id) => ids[id],
  querySelectorAll: (name) => ids.operations.querySelectorAll(name),
};
const [base, script, name, key] = process.argv.slice(2);
const native = fetch;
globalThis.fetch = (url, options) => native(base + url, options);
ids.key.value = key;
const settle = async (done) => { for (let n = 0; n < 500 && !done(); n++) await new Promise((go) => setTimeout(go, 10)); };
(0, eval)(require("fs").readFileSync(script, "utf8"));
(async () => {
  await settle(() => ids.status.textContent !== "" || ids.version.textContent !== "");
  await settle(() => ids.status.textContent !== "Loading…");
  const entries = document.querySelectorAll("details");
  for (const entry of entries) entry.listeners.toggle();
  ids.filter.value = "invoke " + name;
  ids.filter.listeners.input();
  const shown = entries.filter((one) => !one.hidden);
  let answer = "";
  if (shown.length) {
    shown[0].querySelectorAll("textarea")[0].value = "41";
    shown[0].querySelectorAll("button")[0].listeners.click();
    const output = shown[0].querySelectorAll("pre")[0];
    await settle(() => output.textContent.length > 1);
    answer = output.textContent;
  }
  console.log(JSON.stringify({
    version: ids.version.textContent, status: ids.status.textContent, count: entries.length, shown: shown.map((one) => one.dataset.words), answer,
  }));
})();
"""


async def test_the_page_loads_nothing_from_elsewhere(client: httpx.AsyncClient):
    page = await client.get("/docs")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert set(files) == {"/docs/page.css", "/docs/page.js", "/openapi.json", "/console"}
    found = [page, *[await client.get(file) for file in files if file.startswith("/docs/")]]
    for response in found:
        assert response.status_code == 200
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert "://" not in response.text
    # The policy forbids inline scripts and styles, so the files must not use them.
    assert not re.search(r"<script>|<style|style=|onclick|innerHTML", "".join(one.text for one in found[:3]))


async def test_the_page_shows_the_api_and_sends_requests(deploy, gateway: Gateway, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    function = await deploy(ECHO)
    (tmp_path / "browser.js").write_text(BROWSER)
    (tmp_path / "page.js").write_text((await gateway.client.get("/docs/page.js")).text)
    process = await asyncio.create_subprocess_exec(
        node, str(tmp_path / "browser.js"), gateway.url, str(tmp_path / "page.js"), function.name, "",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    seen = json.loads(out)
    assert (seen["version"], seen["status"]) == (__version__, "")
    document = (await gateway.client.get("/openapi.json")).json()
    assert seen["count"] == sum(len(operations) for operations in document["paths"].values())
    assert len(seen["shown"]) == 1
    assert f"/invoke/{function.name}" in seen["shown"][0]
    assert seen["answer"].startswith("200 OK\n")
    assert seen["answer"].endswith("\n\n41")


async def test_the_root_answers_a_health_checker(client: httpx.AsyncClient):
    response = await client.get("/")
    assert response.status_code == 200
    assert response.json() == {
        "name": "pilotflame", "version": __version__, "cog_version": COG_VERSION, "console_url": "/console", "docs_url": "/docs",
        "openapi_url": "/openapi.json", "live_url": "/healthz", "ready_url": "/readyz", "healthcheck_url": "/cog/health-check",
        "predictions_url": "/cog/predictions", "predictions_idempotent_url": "/cog/predictions/{prediction_id}",
        "predictions_cancel_url": "/cog/predictions/{prediction_id}/cancel",
    }  # fmt: skip
    for path in ("/", "/healthz", "/readyz"):
        head = await client.head(path)
        assert (head.status_code, head.content) == (200, b"")
    options = await client.options("/")
    assert (options.status_code, options.headers["Allow"]) == (204, "GET, HEAD, OPTIONS")
    browser = await client.get("/", headers={"Accept": "text/html,application/xhtml+xml"})
    assert (browser.status_code, browser.headers["Location"]) == (303, "/console")


async def test_the_page_and_the_root_need_no_key(state):
    async with gateway_here(state, auth="always") as gateway:
        for path in ("/", "/docs", "/docs/page.js", "/docs/page.css"):
            assert (await gateway.client.get(path)).status_code == 200
        assert (await gateway.client.options("/")).status_code == 204
        assert (await gateway.client.get("/openapi.json")).status_code == 401


async def raw(gateway: Gateway, request: bytes) -> tuple[str, str]:
    """Return (status line, header) of the response to bytes on a connection."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    status, _, header = head.partition("\r\n")
    return status, header


async def test_all_responses_name_the_server_and_json_is_application_json(deploy, gateway: Gateway):
    function = await deploy(ECHO)
    client, name = gateway.client, function.name
    lambda_path = f"/lambda/2015-03-31/functions/{name}/invocations"
    event = {"X-Amz-Invocation-Type": "Event"}
    found = [
        await function.call(1),
        await function.call("no number"),
        await function.call(1, Prefer="respond-async"),
        await client.post(function.path, content=b"{"),
        await client.post("/invoke/none"),
        await client.get("/nothing"),
        await client.put("/healthz"),
        await client.get("/healthz"),
        await client.get("/v1/functions"),
        await client.post("/v1/functions", json={"no": 1}),
        await client.get("/openapi.json"),
        await client.post(f"/v2/{name}/run", json={"input": 1}),
        await client.get(f"/v2/{name}/health"),
        await client.post(lambda_path, json=1),
        await client.post(lambda_path, json=1, headers=event),
        await client.post("/lambda/2015-03-31/functions/none/invocations"),
        await client.post("/cog/predictions", json={"input": {}, "version": "none"}),
    ]
    for response in found:
        assert response.headers["Server"] == f"pilotflame/{__version__}", response.request.url
        wanted = "application/json" if response.content else None
        assert response.headers.get("Content-Type") == wanted, response.request.url
    for request in (b"GET / HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", b"nonsense\r\n\r\n"):
        status, header = await raw(gateway, request)
        assert status.startswith(("HTTP/1.1 400 ", "HTTP/1.0 400 "))
        assert f"Server: pilotflame/{__version__}\r\n" in header
        assert "Content-Type: application/json\r\n" in header


async def test_proxies_do_not_buffer_streams(deploy, gateway: Gateway):
    function = await deploy("def handler(event):\n    yield 1")
    assert (await function.call(1)).headers["X-Accel-Buffering"] == "no"
    job = (await gateway.client.post(f"/v2/{function.name}/run", json={"input": 1})).json()["id"]
    for path in (f"/v2/{function.name}/stream/{job}", f"/cog/predictions/{job}"):
        response = await gateway.client.get(path, headers={"Accept": "text/event-stream"})
        assert response.headers["X-Accel-Buffering"] == "no"
    assert (await gateway.client.get(f"/v1/functions/{function.name}/logs")).headers[
        "X-Accel-Buffering"
    ] == "no"

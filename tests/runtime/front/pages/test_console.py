"""The console's files and its route: what a key may see, which changes are sent, and the end of the work without readers."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from live import LIMIT_S, TRUSTED, Function, Gate, Gateway, failure, gateway_here, until
from pilotflame._version import __version__
from pilotflame.runtime.front.pages import console
from pilotflame.runtime.front.pages.console import MEDIA_TYPES
from pilotflame.runtime.node.functions.live import Live

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event: int) -> int:\n    return event"
WAITS = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
FILES = sorted(path.name for path in console.FOLDER.iterdir())


@pytest.fixture(scope="module", autouse=True)
def _lines_come_sooner() -> Iterator[None]:
    """Send lines more often than once a second, so that these tests do not wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(console, "EVERY_S", 0.25)
        yield


async def lines(client: httpx.AsyncClient) -> AsyncIterator[dict[str, Any]]:
    """Yield the lines that a follower of the console receives."""
    async with (
        asyncio.timeout(LIMIT_S),
        client.stream("GET", "/v1/console", params={"follow": "1"}) as response,
    ):
        assert response.headers["Content-Type"] == "application/x-ndjson"
        async for line in response.aiter_lines():
            yield json.loads(line)


async def row(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found = (await client.get("/v1/console")).json()["functions"]
    return next(one for one in found if one["name"] == name)


async def test_the_page_loads_nothing_from_elsewhere(client: httpx.AsyncClient):
    page = await client.get("/console")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert set(re.findall(r'(?:src|href)="(/[^"]+)"', page.text)) <= {f"/console/{name}" for name in FILES}
    for name in FILES:
        response = await client.get(f"/console/{name}")
        kind = MEDIA_TYPES[f".{name.rpartition('.')[2]}"]
        assert response.headers["Content-Type"] == f"{kind}; charset=utf-8"
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        # Ignore the namespace of SVG, which looks like an address, but is not loaded.
        assert "://" not in response.text.replace("http://www.w3.org/2000/svg", ""), name
        # The policy forbids inline scripts and styles, so the files must not use them.
        assert not re.search(
            r"<script>|<style|style=|onclick=|innerHTML|outerHTML|insertAdjacentHTML|eval\(", response.text
        ), name
        for used in re.findall(r'from "\./([^"]+)"', response.text):
            assert used in FILES
    for missing in ("none.js", "console.py", "..%2fconsole.py", "%2e%2e/console.py"):
        assert failure(await client.get(f"/console/{missing}"))["status"] == 404


async def test_a_function_is_shown_with_its_rung_and_its_counts(deploy, gateway: Gateway, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 3}, gate=gate)
    # Wait for the end of the worker that has checked the deploy.
    await function.settled(ready=0)
    found = await row(gateway.client, function.name)
    assert (found["rung"], found["workers"]) == (
        "zygote",
        {"ready": 0, "parked": 0, "starting": 0, "draining": 0, "max": 3},
    )
    assert (found["codes"], found["cold_starts"], sum(found["durations"])) == ({}, 0, 0)
    calls = [asyncio.create_task(function.call(n)) for n in range(2)]
    await gate.next()
    running = await row(gateway.client, function.name)
    assert running["in_flight"] + running["queued"] == 2
    gate.open()
    await asyncio.gather(*calls)
    await function.answer(3)
    done = await row(gateway.client, function.name)
    assert done["rung"] == "ready"
    assert done["codes"] == {"200": 3}
    assert sum(done["durations"]) == 3
    assert 1 <= done["cold_starts"] <= 2
    status = await function.status()
    assert done["revision"] == status["revision"]
    assert done["last_cold_phases_ms"] == pytest.approx(status["last_cold_start_phases_ms"], abs=1e-3)
    assert done["cold_phases_s"].keys() == done["last_cold_phases_ms"].keys()


async def test_a_follower_is_sent_what_has_changed(deploy, gateway: Gateway):
    still, busy = await deploy(ECHO), await deploy(ECHO)
    for function in (still, busy):
        await function.settled(ready=0)
    seen = lines(gateway.client)
    first = await anext(seen)
    assert {one["name"] for one in first["functions"]} >= {still.name, busy.name}
    assert first["gateway"]["version"] == __version__
    assert first["gateway"]["keyed"] is False
    assert len(first["gateway"]["bounds_s"]) + 1 == len(first["functions"][0]["durations"])
    known = {one["name"]: one for one in first["functions"]}
    found = first
    while still.name in {one["name"] for one in found["functions"]}:
        found = await anext(seen)
        known |= {one["name"]: one for one in found["functions"]}
    await busy.answer(1)
    while known[busy.name]["codes"] != {"200": 1}:
        for one in (await anext(seen))["functions"]:
            assert one != known[one["name"]]
            known[one["name"]] = one
    await gateway.client.delete(f"/v1/functions/{still.name}")
    while still.name not in (found := await anext(seen))["removed"]:
        assert still.name not in {one["name"] for one in found["functions"]}
    await seen.aclose()


async def test_followers_share_the_rows(deploy, gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    function, made, row_of = await deploy(ECHO), list[str](), console.Console._row

    def counted(self: console.Console, live: Live) -> console.ConsoleFunction:
        made.append(live.record.function)
        return row_of(self, live)

    monkeypatch.setattr(console.Console, "_row", counted)
    seen, began_s = [lines(gateway.client) for _ in range(5)], time.monotonic()
    for _ in range(4):
        for one in seen:
            await anext(one)
    for one in seen:
        await one.aclose()
    # Each follower may add one call, because its first rows must not be older than its request.
    assert 2 <= made.count(function.name) <= len(seen) + (time.monotonic() - began_s) / console.EVERY_S


async def test_the_first_rows_of_a_follower_are_not_older_than_its_request(
    deploy, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(console, "EVERY_S", 60.0)
    function = await deploy(ECHO)
    earlier, later = lines(gateway.client), lines(gateway.client)
    await anext(earlier)
    await function.answer(1)
    (found,) = [one for one in (await anext(later))["functions"] if one["name"] == function.name]
    assert found["codes"] == {"200": 1}
    for one in (earlier, later):
        await one.aclose()


async def test_nothing_goes_on_when_nobody_reads(gateway: Gateway):
    before = len(asyncio.all_tasks())
    client = httpx.AsyncClient(base_url=gateway.url, timeout=60)
    seen = [lines(client) for _ in range(5)]
    for one in seen:
        await anext(one)
    assert len(asyncio.all_tasks()) >= before + 5
    for one in seen:
        await one.aclose()
    await client.aclose()

    async def ended() -> bool:
        return len(asyncio.all_tasks()) <= before

    await until(ended, "the end of the tasks of readers that have gone")


async def test_a_stream_ends_when_its_key_is_revoked(state):
    async with gateway_here(state, auth="always") as gateway, gateway.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "a", "scopes": ["read"]})).json()
        gateway.client.headers["Authorization"] = f"Bearer {made['key']}"
        seen = lines(gateway.client)
        assert (await anext(seen))["gateway"]["keyed"] is True
        await home.delete(f"/v1/keys/{made['id']}")
        # The stream must end by itself. Otherwise, `lines` raises TimeoutError.
        assert all(line["gateway"]["keyed"] for line in [line async for line in seen])
        assert (await gateway.client.get("/v1/console?follow=1")).status_code == 401


async def test_a_stream_without_a_key_ends_when_the_gateway_s_first_key_is_made(state):
    async with gateway_here(state) as gateway, gateway.at_home() as home:
        seen = lines(gateway.client)
        assert (await anext(seen))["gateway"]["keyed"] is False
        await home.post("/v1/keys", json={"name": "a", "scopes": ["read"]})
        assert isinstance([line async for line in seen], list)
        assert (await gateway.client.get("/v1/console?follow=1")).status_code == 401


async def test_a_key_sees_its_functions_alone(state):
    async with gateway_here(state, auth="always") as gateway:
        for path in ("/console", "/console/main.js"):
            assert (await gateway.client.get(path)).status_code == 200
        assert (await gateway.client.get("/v1/console")).status_code == 401
        async with gateway.at_home() as home:
            mine: Function = await Gateway.deploy(_with(gateway, home), ECHO, name="mine")
            await Gateway.deploy(_with(gateway, home), ECHO, name="theirs")
            scoped = {"read": ["read"], "deploy": ["read", "deploy"], "invoke": ["invoke"]}
            keys = {
                name: (
                    await home.post(
                        "/v1/keys",
                        json={
                            "name": name,
                            "scopes": [name],
                            "functions": [mine.name],
                            **({"policy": TRUSTED} if name == "deploy" else {}),
                        },
                    )
                ).json()["key"]
                for name in scoped
            }
        for name, scopes in scoped.items():
            gateway.client.headers["Authorization"] = f"Bearer {keys[name]}"
            response = await gateway.client.get("/v1/console")
            if name == "invoke":
                assert failure(response)["status"] == 403
                continue
            found = response.json()
            assert [one["name"] for one in found["functions"]] == ["mine"]
            assert found["gateway"]["scopes"] == scopes
            seen = lines(gateway.client)
            assert [one["name"] for one in (await anext(seen))["functions"]] == ["mine"]
            await seen.aclose()


def _with(gateway: Gateway, client: httpx.AsyncClient) -> Gateway:
    other = Gateway(gateway.url, gateway.state)
    other.client = client
    return other

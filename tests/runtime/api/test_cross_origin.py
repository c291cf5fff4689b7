"""CORS: which web pages may call which routes, with preflight requests and responses as browsers need them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from live import Function, Gateway, failure, gateway_here, short_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event"
STREAM = "def handler(event):\n    yield 1"
SHOP, OTHER, ADMIN = "https://shop.example", "https://other.example", "http://intranet:3000"
ALLOW, EXPOSE = "Access-Control-Allow-Origin", "Access-Control-Expose-Headers"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, cors_origins=(ADMIN,)) as found:
            yield found


async def preflight(client: httpx.AsyncClient, path: str, origin: str, method: str = "POST", **more: str) -> httpx.Response:  # fmt: skip
    headers = {
        "Origin": origin, "Access-Control-Request-Method": method, "Sec-Fetch-Site": "cross-site",
        "Access-Control-Request-Headers": "authorization,content-type", **more,
    }  # fmt: skip
    return await client.options(path, headers=headers)


async def call(function: Function, origin: str, event: object = 1) -> httpx.Response:
    return await function.call(event, Origin=origin, Sec_Fetch_Site="cross-site")


async def test_a_page_calls_a_function_that_allows_its_origin(deploy):
    function = await deploy(ECHO, {"cors.origins": f'["{SHOP}"]', "cors.max_age_s": 60})
    asked = await preflight(function.client, function.path, SHOP)
    assert (asked.status_code, asked.content) == (204, b"")
    assert asked.headers[ALLOW] == SHOP
    assert asked.headers["Access-Control-Allow-Methods"] == "POST"
    assert asked.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert asked.headers["Access-Control-Max-Age"] == "60"
    assert "Origin" in asked.headers["Vary"]
    assert "Access-Control-Allow-Credentials" not in asked.headers
    response = await call(function, SHOP)
    assert (response.status_code, response.json()) == (200, 1)
    assert (response.headers[ALLOW], response.headers[EXPOSE]) == (SHOP, "*")
    assert "Origin" in response.headers["Vary"]
    # Large responses are compressed, and then vary by their coding as well.
    large = await call(function, SHOP, "x" * 5000)
    assert {part.strip() for part in large.headers["Vary"].split(",")} == {"Accept-Encoding", "Origin"}
    # The page can read errors, too, and jobs.
    refused = await function.client.post(function.path, content=b"{", headers={"Origin": SHOP})
    assert (refused.status_code, refused.headers[ALLOW]) == (400, SHOP)
    queued = await function.client.post(
        f"/v2/{function.name}/run", json={"input": 1}, headers={"Origin": SHOP}
    )
    assert (queued.status_code, queued.headers[ALLOW]) == (200, SHOP)


async def test_a_stream_has_the_headers(deploy):
    function = await deploy(STREAM, {"cors.origins": '["*"]'})
    response = await call(function, OTHER)
    assert response.headers[ALLOW] == "*"
    assert "data: 1" in response.text


async def test_other_pages_and_other_routes_are_refused(deploy, gateway: Gateway):
    function = await deploy(ECHO, {"cors.origins": f'["{SHOP}"]'})
    closed = await deploy(ECHO)
    for path, origin in (
        (function.path, OTHER), (closed.path, SHOP), (closed.path, "null"), ("/v1/functions", ADMIN),
        ("/v1/keys", ADMIN), (f"/v1/functions/{function.name}", SHOP), ("/invoke/none", SHOP),
    ):  # fmt: skip
        asked = await preflight(gateway.client, path, origin, "POST")
        assert asked.status_code >= 400
        assert ALLOW not in asked.headers
        response = await gateway.client.post(path, json={}, headers={"Origin": origin})
        assert failure(response)["type"] == "forbidden"
        assert ALLOW not in response.headers
    # A page that sends no Origin, as a link or an image does, is refused as before.
    response = await gateway.client.post(function.path, headers={"Sec-Fetch-Site": "cross-site"})
    assert failure(response)["type"] == "forbidden"


async def test_the_gateways_origins_may_call_all_functions(deploy):
    for settings in ({}, {"cors.origins": f'["{SHOP}"]'}):
        function = await deploy(ECHO, settings)
        assert (await preflight(function.client, function.path, ADMIN)).headers[ALLOW] == ADMIN
        assert (await call(function, ADMIN)).headers[ALLOW] == ADMIN
    asked = await preflight(
        function.client, "/predictions/x", ADMIN, "GET", **{"Access-Control-Request-Private-Network": "true"}
    )
    assert asked.headers["Access-Control-Allow-Private-Network"] == "true"


async def test_a_preflight_needs_no_key_and_the_call_does(state: Path):
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway, gateway.at_home() as home:
        key = (await home.post("/v1/keys", json={"name": "k", "scopes": ["admin"]})).json()["key"]
        gateway.client.headers["Authorization"] = f"Bearer {key}"
        function = await gateway.deploy(ECHO, {"cors.origins": f'["{SHOP}"]'})
        async with httpx.AsyncClient(base_url=gateway.url) as page:
            assert (await preflight(page, function.path, SHOP)).status_code == 204
            assert (await preflight(page, function.path, OTHER)).status_code == 401
            refused = await page.post(function.path, json=1, headers={"Origin": SHOP})
            assert (refused.status_code, refused.headers[ALLOW]) == (401, SHOP)
            given = {"Origin": SHOP, "Authorization": f"Bearer {key}"}
            assert (await page.post(function.path, json=1, headers=given)).headers[ALLOW] == SHOP
            # With a key, the origin is no reason to refuse; but the browser does not show the response.
            given["Origin"] = OTHER
            response = await page.post(function.path, json=1, headers=given)
            assert (response.status_code, ALLOW in response.headers) == (200, False)


async def test_an_allowed_origin_does_not_excuse_a_foreign_host(deploy):
    function = await deploy(ECHO, {"cors.origins": "*"})
    response = await function.client.post(
        function.path, json=1, headers={"Origin": OTHER, "Host": "rebound.example"}
    )
    assert failure(response)["type"] == "forbidden"

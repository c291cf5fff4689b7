"""CORS: which web pages may call which routes, with preflight requests and responses as browsers need them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import Function, Gateway, failure, gateway_here, short_folder
from pilotflame.errors import Forbidden
from pilotflame.runtime.front.http.cross_origin import MAX_AGE_S, CrossOrigin
from pilotflame.runtime.front.http.host_names import HostNames
from pilotflame.runtime.ground.access.host_claims import HostClaims

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
    function = await deploy(ECHO, {"cors.origins": f'["{SHOP}"]'})
    asked = await preflight(function.client, function.path, SHOP)
    assert (asked.status_code, asked.content) == (204, b"")
    assert asked.headers[ALLOW] == SHOP
    assert asked.headers["Access-Control-Allow-Methods"] == "POST"
    assert asked.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    assert asked.headers["Access-Control-Max-Age"] == MAX_AGE_S
    assert "Origin" in asked.headers["Vary"]
    assert "Access-Control-Allow-Credentials" not in asked.headers
    response = await call(function, SHOP)
    assert (response.status_code, response.json()) == (200, 1)
    assert (response.headers[ALLOW], response.headers[EXPOSE]) == (SHOP, "*")
    assert "Origin" in response.headers["Vary"]
    # Large responses are compressed, and then vary by their coding as well.
    large = await call(function, SHOP, "x" * 5000)
    assert {part.strip() for part in large.headers["Vary"].split(",")} == {"Accept-Encoding", "Origin"}
    # The page may also read errors and the answers about jobs.
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
    # A cross-site request without Origin, such as the request of a link or an image, is refused although `cors.origins` allows a page.
    response = await gateway.client.post(function.path, headers={"Sec-Fetch-Site": "cross-site"})
    assert failure(response)["type"] == "forbidden"


async def test_the_gateways_origins_may_call_all_functions(deploy):
    for settings in ({}, {"cors.origins": f'["{SHOP}"]'}):
        function = await deploy(ECHO, settings)
        assert (await preflight(function.client, function.path, ADMIN)).headers[ALLOW] == ADMIN
        assert (await call(function, ADMIN)).headers[ALLOW] == ADMIN
    asked = await preflight(
        function.client,
        "/cog/predictions/x",
        ADMIN,
        "GET",
        **{"Access-Control-Request-Private-Network": "true"},
    )
    assert asked.headers["Access-Control-Allow-Private-Network"] == "true"


async def test_a_preflight_needs_no_key_and_the_call_does(state: Path):
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway, gateway.at_home() as home:
        key = (await home.post("/v1/keys", json={"name": "k", "scopes": ["admin"]})).json()["key"]
        gateway.client.headers["Authorization"] = f"Bearer {key}"
        function = await gateway.deploy(ECHO, {"cors.origins": f'["{SHOP}"]'})
        async with httpx.AsyncClient(base_url=gateway.url) as page:
            assert (await preflight(page, function.path, SHOP)).status_code == 204
            assert (await preflight(page, function.path, OTHER)).status_code == 403
            refused = await page.post(function.path, json=1, headers={"Origin": SHOP})
            assert (refused.status_code, refused.headers[ALLOW]) == (401, SHOP)
            given = {"Origin": SHOP, "Authorization": f"Bearer {key}"}
            assert (await page.post(function.path, json=1, headers=given)).headers[ALLOW] == SHOP
            # A key does not admit a page of another origin, because a proxy may add the key to the requests of any page.
            given["Origin"] = OTHER
            response = await page.post(function.path, json=1, headers=given)
            assert (response.status_code, ALLOW in response.headers) == (403, False)


LOCAL = ("http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:8080", "https://localhost")


async def test_pages_of_this_machine_call_functions_of_a_gateway_without_keys(deploy):
    function = await deploy(ECHO)
    for origin in LOCAL:
        for path in (function.path, f"/v2/{function.name}/run", "/cog/predictions"):
            asked = await preflight(function.client, path, origin)
            assert (asked.status_code, asked.headers[ALLOW]) == (204, origin)
            assert "Access-Control-Allow-Credentials" not in asked.headers
        # For a browser, localhost and 127.0.0.1 are different sites, so this request is cross-site.
        response = await call(function, origin)
        assert (response.status_code, response.headers[ALLOW]) == (200, origin)


async def test_pages_of_this_machine_do_not_read_or_change_control_routes(deploy, gateway: Gateway):
    function = await deploy(ECHO)
    routes = [
        ("GET", "/v1/functions"), ("POST", "/v1/functions"), ("DELETE", f"/v1/functions/{function.name}"),
        ("GET", f"/v1/functions/{function.name}/logs"), ("POST", "/v1/keys"), ("GET", "/metrics"), ("GET", "/v1/usage"),
        ("GET", "/openapi.json"),
    ]  # fmt: skip
    for method, path in routes:
        asked = await preflight(gateway.client, path, LOCAL[0], method)
        assert (asked.status_code >= 400, ALLOW in asked.headers) == (True, False), path
        for headers in (
            {"Origin": LOCAL[0]}, {"Origin": LOCAL[0], "Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
            {"Origin": LOCAL[0], "Sec-Fetch-Site": "same-site"},
        ):  # fmt: skip
            response = await gateway.client.request(method, path, headers=headers)
            assert failure(response)["type"] == "forbidden", (path, headers)
            assert ALLOW not in response.headers


async def test_the_gateways_own_pages_use_control_routes(deploy, gateway: Gateway):
    function = await deploy(ECHO)
    for headers in (
        {"Origin": gateway.url}, {"Origin": gateway.url, "Sec-Fetch-Site": "same-origin"}, {"Sec-Fetch-Site": "none"},
        # A proxy on this machine may have changed Host, so Origin differs from Host.
        {"Origin": "http://localhost:8080", "Sec-Fetch-Site": "same-origin"},
    ):  # fmt: skip
        path = f"/v1/functions/{function.name}/reset"
        assert (await gateway.client.post(path, headers=headers)).status_code == 200, headers


async def test_pages_do_not_read_the_webhook_secret(gateway: Gateway):
    path = "/replicate/v1/webhooks/default/secret"
    assert (await gateway.client.get(path)).json()["key"].startswith("whsec_")
    response = await gateway.client.get(path, headers={"Origin": LOCAL[0]})
    assert failure(response)["type"] == "forbidden"


async def test_origins_that_only_look_like_this_machine(deploy):
    function = await deploy(ECHO)
    for origin in (
        "http://localhost.evil.example", "http://evil.example/localhost", "http://localhost@evil.example", "null",
        "http://127.0.0.1.evil.example", "file://localhost", "http://a.localhost", "http://127.0.0.2", "localhost:3000",
        "http://localhost:3000/", "http://2130706433",
    ):  # fmt: skip
        asked = await preflight(function.client, function.path, origin)
        assert (asked.status_code >= 400, ALLOW in asked.headers) == (True, False), origin
        response = await call(function, origin)
        assert failure(response)["type"] == "forbidden", origin
        assert ALLOW not in response.headers
    # DNS rebinding: the owner of a web page can make any name resolve to this machine.
    rebound = {"Origin": LOCAL[0], "Host": "rebound.example"}
    response = await function.client.post(function.path, json=1, headers=rebound)
    assert failure(response)["type"] == "forbidden"


async def test_pages_of_this_machine_are_as_others_once_there_are_keys(state: Path):
    async with gateway_here(state, auth="always", drain_s=1.0) as gateway:
        assert ALLOW not in (await preflight(gateway.client, "/cog/predictions", LOCAL[0])).headers
        refused = await gateway.client.post("/cog/predictions", json={}, headers={"Origin": LOCAL[0]})
        assert (refused.status_code, ALLOW in refused.headers) == (403, False)


OWN_HOSTS = [
    "127.0.0.1:8600", "127.0.0.1", "localhost:1", "LOCALHOST", "127.8.9.10:80", "[::1]:8600", "[::1]", "shop.localhost:8600",
    "shop.apps.test",
]  # fmt: skip
OTHER_HOSTS = [
    "x", "", "example.org", "rebound.example:8600", "localhost.example.org", "127.0.0.1.example.org", "10.0.0.1",
    "0.0.0.0:8600", "[::]", "[2001:db8::1]:80", "[", "127.0.0.1@example.org", "example.org@127.0.0.1", "\udcff",
    "shop.localhost.test", "apps.test",
]  # fmt: skip


def admits(headers: dict[str, str], *, keyed: bool = False, prefix: str = "/asgi/{function}") -> bool:
    """Return False if the request is refused on a route that no CORS setting may open to pages."""
    hosts = HostNames(HostClaims(["*.apps.test"], tuple).find, prefix)
    functions: Any = None
    try:
        CrossOrigin(functions, (), ("*",), hosts, lambda: not keyed).check(headers, "/v1/functions", None)
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize("host", OWN_HOSTS)
async def test_names_of_this_machine_and_of_functions_are_accepted(host: str) -> None:
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}, {}):
        assert admits(headers)
        assert admits(headers, keyed=True)
    # Without a plugin that serves apps, the host names of functions are refused like other foreign names.
    assert admits({"Host": host}, prefix="") is not host.startswith("shop.")


@pytest.mark.parametrize("host", OTHER_HOSTS)
async def test_other_names_are_refused_even_after_a_good_one(host: str) -> None:
    assert admits({"Host": "localhost:8600"})
    page = {"Host": "localhost:8600", "Origin": f"http://{host}"}
    assert not admits({"Host": host})
    assert not admits(page)
    assert not admits(page, keyed=True)
    assert admits({"Host": host}, keyed=True)
    assert admits({"Host": "localhost:8600", "Sec-Fetch-Site": "none"})


OWN = {"Host": "gateway.test", "Origin": "https://gateway.test"}
SITE, DEST = "Sec-Fetch-Site", "Sec-Fetch-Dest"


@pytest.mark.parametrize(
    ("headers", "admitted"),
    [
        (OWN, True), (OWN | {SITE: "same-origin"}, True), (OWN | {SITE: "same-site"}, False),
        # If a proxy has changed Host, only Sec-Fetch-Site shows that the page is the gateway's own.
        (OWN | {"Host": "10.0.0.1:8600"}, False), (OWN | {"Host": "10.0.0.1:8600", SITE: "same-origin"}, True),
        ({SITE: "same-site"}, False), ({SITE: "cross-site"}, False), ({SITE: "cross-site", DEST: "document"}, False),
        ({SITE: "future"}, False), ({"Origin": "null"}, False), ({"Origin": "http://shop.gateway.test"}, False),
        # Other sites may link to an app at its own host name.
        ({"Host": "shop.apps.test", SITE: "cross-site", DEST: "document"}, True),
        ({"Host": "shop.apps.test", SITE: "cross-site", DEST: "iframe"}, False),
        ({"Host": "shop.apps.test", SITE: "cross-site", DEST: "document", "Origin": "null"}, False),
        ({"Host": "shop.apps.test", SITE: "same-site", "Origin": "https://evil.apps.test"}, False),
    ],
)  # fmt: skip
async def test_pages_are_refused_with_a_key_too(headers: dict[str, str], admitted: bool) -> None:
    assert admits(headers, keyed=True) is admitted
    assert not admits({"Host": "localhost"} | headers)


async def test_an_allowed_origin_does_not_excuse_a_foreign_host(deploy):
    function = await deploy(ECHO, {"cors.origins": "*"})
    response = await function.client.post(
        function.path, json=1, headers={"Origin": OTHER, "Host": "rebound.example"}
    )
    assert failure(response)["type"] == "forbidden"

"""Web pages of elsewhere, and names of elsewhere that point here: a gateway without keys does not obey them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from live import failure, gateway_here
from pilotflame.errors import Forbidden
from pilotflame.runtime.api.origin import OriginCheck
from pilotflame.runtime.functions.code import pack

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"
HERE = ["127.0.0.1:8600", "127.0.0.1", "localhost:1", "LOCALHOST", "127.8.9.10:80", "[::1]:8600", "[::1]"]
ELSEWHERE = [
    "x", "", "example.org", "rebound.example:8600", "localhost.example.org", "127.0.0.1.example.org", "10.0.0.1",
    "0.0.0.0:8600", "[::]", "[2001:db8::1]:80", "[", "127.0.0.1@example.org", "example.org@127.0.0.1", "\udcff",
]  # fmt: skip
PAGES = [
    {"Origin": "https://example.org"},
    {"Origin": "null"},
    {"Origin": "http://localhost.example.org:8600"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Host": "rebound.example:8600"},
    {
        "Host": "rebound.example:8600",
        "Origin": "http://rebound.example:8600",
        "Sec-Fetch-Site": "same-origin",
    },
]


@pytest.mark.parametrize("host", HERE)
async def test_this_machines_names_are_good(host: str):
    check = OriginCheck()
    for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}, {}):
        check.check(headers)


@pytest.mark.parametrize("host", ELSEWHERE)
async def test_other_names_are_not_even_after_a_good_one(host: str):
    check = OriginCheck()
    check.check({"Host": "localhost:8600"})
    for headers in ({"Host": host}, {"Host": "localhost:8600", "Origin": f"http://{host}"}):
        with pytest.raises(Forbidden):
            check.check(headers)
    check.check({"Host": "localhost:8600", "Sec-Fetch-Site": "none"})


@pytest.mark.parametrize("sent", PAGES, ids="-".join)
async def test_a_web_page_of_elsewhere_can_do_nothing(gateway, deploy, tmp_path: Path, sent: dict[str, str]):
    function = await deploy(ECHO)
    (tmp_path / "handler.py").write_text(ECHO)
    client: httpx.AsyncClient = gateway.client
    archive = {"Content-Type": "application/gzip"}
    for response in (
        await client.post("/v1/functions", content=pack(tmp_path), headers={**archive, **sent}),
        await client.post(function.path, content=b"1", headers={"Content-Type": "text/plain", **sent}),
        await client.post(f"/2015-03-31/functions/{function.name}/invocations", content=b"1", headers=sent),
        await client.get("/v1/functions", headers=sent),
        await client.get("/nothing/here", headers=sent),
    ):
        assert response.status_code == 403
        assert "Without API keys" in response.text
    error = failure(await client.get("/v1/functions", headers=sent))
    assert (error["type"], "pilotflame keys create" in error["remedy"]) == ("forbidden", True)
    assert [one["name"] for one in (await client.get("/v1/functions")).json()["functions"]] == [function.name]
    assert (await client.get("/healthz", headers=sent)).status_code == 200


async def test_a_page_of_this_machine_may(gateway, deploy):
    function = await deploy(ECHO)
    headers = {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}
    assert (await gateway.client.post(function.path, json=1, headers=headers)).json() == 1


async def test_where_a_key_is_asked_for_any_name_will_do(state: Path):
    async with gateway_here(state, auth="always") as gateway:
        async with gateway.at_home() as home:  # whose Host is "home": the socket says who it is
            key = (await home.post("/v1/keys", json={"name": "x", "scopes": ["admin"]})).json()["key"]
        headers = {
            "Host": "gateway.example",
            "Origin": "https://example.org",
            "Authorization": f"Bearer {key}",
        }
        assert (await gateway.client.get("/v1/functions", headers=headers)).status_code == 200


async def test_on_its_own_socket_any_name_will_do(gateway):
    async with gateway.at_home() as home:
        assert (await home.get("/v1/functions")).status_code == 200

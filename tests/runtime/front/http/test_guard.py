"""The guard of real gateways: without a key only health is served; a key gives access to what it covers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import TRUSTED, Function, Gate, Gateway, failure, gateway_here, gateway_process, short_folder, until
from pilotflame.runtime.front.http.guard import token_in
from pilotflame.runtime.ground.access.control_socket import CONTROL_KEY
from pilotflame.runtime.ground.access.keyring import USE_GRAIN_S
from pilotflame.runtime.node.packaging.code import pack

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    print('heard', event, flush=True)\n    return event\n"
ROUTES = [
    ("POST", "/invoke/{f}"),
    ("GET", "/v1/functions/{f}"),
    ("GET", "/v1/functions/{f}/logs"),
    ("GET", "/v1/functions/{f}/secrets"),
    ("PUT", "/v1/functions/{f}/secrets/TOKEN"),
    ("DELETE", "/v1/functions/{f}/secrets/TOKEN"),
    ("DELETE", "/v1/functions/{f}"),
    ("POST", "/v1/functions/{f}/prefetch"),
    ("POST", "/v2/{f}/warmup"),
    ("POST", "/v2/{f}/run"),
    ("POST", "/v2/{f}/runsync"),
    ("GET", "/v2/{f}/status/job-x"),
    ("GET", "/v2/{f}/stream/job-x"),
    ("POST", "/v2/{f}/cancel/job-x"),
    ("POST", "/v2/{f}/retry/job-x"),
    ("POST", "/v2/{f}/purge-queue"),
    ("GET", "/v2/{f}/health"),
    ("GET", "/v2/{f}/requests"),
]
ELSEWHERE = [
    ("GET", "/v1/functions"),
    ("POST", "/v1/functions"),
    ("GET", "/v1/keys"),
    ("POST", "/v1/keys"),
    ("DELETE", "/v1/keys/000000000000"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing/here"),
    ("PATCH", "/healthz"),
]


async def made(gateway: Gateway, **wanted: Any) -> dict[str, Any]:
    """Create a key."""
    policy = {"policy": TRUSTED} if "deploy" in wanted.get("scopes", ()) else {}
    async with gateway.at_home() as home:
        response = await home.post("/v1/keys", json={"name": "test", **policy, **wanted})
    assert response.status_code == 201, response.text
    return dict(response.json())


def bearer(key: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {key['key']}"}


@contextlib.asynccontextmanager
async def opened(gateway: Gateway, key: dict[str, Any]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, headers=bearer(key), timeout=60) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """Yield a gateway with `auth="always"` and the functions `mine` and `theirs`. `gateway.client` has an admin's key."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, auth="always") as found:
            found.client.headers.update(bearer(await made(found, scopes=["admin"])))
            for name in ("mine", "theirs"):
                await found.deploy(ECHO, name=name)
            yield found


Opened = Callable[..., Any]


@pytest_asyncio.fixture(loop_scope="module")
async def keyed(gateway: Gateway) -> AsyncIterator[Opened]:
    """Yield a function: `await keyed(scopes=…, functions=…)` returns a client with a new key."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**wanted: Any) -> httpx.AsyncClient:
            return await stack.enter_async_context(opened(gateway, await made(gateway, **wanted)))

        yield make


async def refused_all(client: httpx.AsyncClient, functions: tuple[str, ...]) -> None:
    """Check that all routes except the health routes answer 401."""
    routes = [(method, path.format(f=name)) for method, path in ROUTES for name in functions]
    for method, path in routes + ELSEWHERE:
        response = await client.request(method, path)
        assert failure(response)["type"] == "unauthorized", path
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/healthz", "/readyz"):
        assert (await client.get(path)).status_code == 200


# -- without a key


async def test_without_a_key_only_health_answers(gateway: Gateway):
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        await refused_all(client, ("mine", "nowhere"))


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer x y", "Bearer pf_x", "Basic dXNlcjpwYXNz", "Bearer pf_000000000000_" + "0" * 64, "AWS4-HMAC-SHA256 Credential=x"]
)  # fmt: skip
async def test_an_invalid_key_is_refused(gateway: Gateway, header: str):
    async with httpx.AsyncClient(base_url=gateway.url, headers={"Authorization": header}) as client:
        await refused_all(client, ("mine",))


async def test_a_header_that_is_not_text_is_refused(gateway: Gateway):
    headers = [(b"Authorization", b"Bearer pf_\xff\xfe")]
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers) as client:
        assert (await client.get("/v1/functions")).status_code == 401


async def test_a_gateway_open_to_other_machines_serves_only_health_until_there_is_a_key(state: Path):
    addresses = [found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    async with gateway_process(state, host="0.0.0.0") as gateway:
        port = httpx.URL(gateway.url).port
        said = (state.parent / "gateway.log").read_text()
        assert "pilotflame keys create NAME --scope admin" in said
        assert str(state) in said
        for address in {"127.0.0.1", *addresses}:
            async with httpx.AsyncClient(base_url=f"http://{address}:{port}") as client:
                await refused_all(client, ("mine",))
        key = await made(gateway, scopes=["admin"])
        async with opened(gateway, key) as client:
            assert (await client.get("/v1/functions")).json() == {"functions": []}
            # Folders are not read for callers who may be remote.
            assert (
                failure(await client.post("/v1/functions", json={"path": "/tmp"}))["type"] == "code_invalid"
            )
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            await refused_all(client, ("mine",))


async def test_on_loopback_the_first_key_closes_the_gateway_for_good(state: Path):
    async with gateway_here(state) as gateway:
        assert (await gateway.client.get("/v1/functions")).status_code == 200
        response = await gateway.client.post("/v1/keys", json={"name": "first", "scopes": ["admin"]})
        key = response.json()
        assert "no-store" in response.headers["Cache-Control"]
        assert (await gateway.client.get("/v1/functions")).status_code == 401
        async with opened(gateway, key) as client:
            assert (await client.get("/v1/functions")).status_code == 200
            assert (await client.delete(f"/v1/keys/{key['id']}")).status_code == 200
            assert (await client.get("/v1/functions")).status_code == 401
        assert (await gateway.client.get("/v1/functions")).status_code == 401
    async with gateway_here(state) as gateway:
        assert (await gateway.client.get("/v1/functions")).status_code == 401
        async with gateway.at_home() as home:
            assert (await home.get("/v1/keys")).json() == {"keys": []}


# -- with a key


async def test_a_key_may_come_with_or_without_bearer(gateway: Gateway):
    key = await made(gateway)
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        for header in (f"Bearer {key['key']}", f"bearer  {key['key']}", key["key"]):
            response = await client.post("/invoke/mine", json=1, headers={"Authorization": header})
            assert response.status_code == 200, header


async def test_a_key_may_come_as_the_session_token_of_a_signed_request(gateway: Gateway):
    key = await made(gateway)
    signed = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/lambda/aws4_request, Signature=0"
    }
    async with httpx.AsyncClient(base_url=gateway.url, headers=signed) as client:
        for token, status in ((key["key"], 200), ("", 401), (key["key"][:-1] + "x", 401)):
            response = await client.post("/invoke/mine", json=1, headers={"X-Amz-Security-Token": token})
            assert response.status_code == status, token
        # The session token is the key only in a signed request.
        both = {"Authorization": "Bearer pf_x", "X-Amz-Security-Token": key["key"]}
        assert (await client.post("/invoke/mine", json=1, headers=both)).status_code == 401


async def test_a_key_may_come_in_the_header_that_the_route_names(gateway: Gateway):
    key = await made(gateway)
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        async def status(path: str, headers: dict[str, str]) -> int:
            return (await client.post(path, json={}, headers=headers)).status_code

        named = {
            "/v1/messages": "x-api-key",
            "/openai/v1/embeddings": "api-key",
            "/openai/deployments/mine/embeddings": "api-key",
        }
        for path, header in named.items():
            assert await status(path, {header: key["key"]}) == 400
            assert await status(path, {header: key["key"][:-1] + "x"}) == 401
            # If a request has both headers, Authorization is the key.
            assert await status(path, {header: key["key"], "Authorization": "Bearer x"}) == 401
            other = {"x-api-key", "api-key"} - {header}
            assert await status(path, dict.fromkeys(other, key["key"])) == 401
        assert await status("/invoke/mine", dict.fromkeys(named.values(), key["key"])) == 401


@pytest.mark.parametrize(
    ("header", "token"), [("Bearer x", "x"), ("BEARER x ", "x"), ("x", "x"), ("Basic x", "Basic x"), ("", "")]
)
async def test_the_token_of_a_header(header: str, token: str):
    assert token_in(header) == token


async def test_scopes_are_kept_apart(keyed: Opened):
    invoke, deploy = await keyed(scopes=["invoke"]), await keyed(scopes=["deploy"])
    assert (await invoke.post("/invoke/mine", json=1)).json() == 1
    assert (await invoke.post("/v2/mine/warmup")).status_code == 200
    assert (await deploy.get("/v1/functions/mine")).status_code == 200
    for client, method, path in [
        (invoke, "GET", "/v1/functions"),
        (invoke, "GET", "/v1/functions/mine"),
        (invoke, "GET", "/v1/functions/mine/logs"),
        (invoke, "GET", "/v1/functions/mine/secrets"),
        (invoke, "DELETE", "/v1/functions/mine"),
        (invoke, "POST", "/v1/functions"),
        (deploy, "POST", "/invoke/mine"),
        (deploy, "GET", "/v1/logs/audit"),
        (deploy, "GET", "/v1/keys"),
        (deploy, "POST", "/v1/keys"),
        (invoke, "DELETE", "/v1/keys/000000000000"),
    ]:
        error = failure(await client.request(method, path))
        assert (error["status"], error["type"]) == (403, "forbidden"), path
    assert (await invoke.get("/nothing/here")).status_code == 404
    assert (await invoke.post("/healthz")).status_code == 405


async def test_a_key_that_only_reads_sees_figures_and_changes_nothing(gateway: Gateway, keyed: Opened):
    source = {"type": "sqs", "queue": "http://127.0.0.1:1/000000000000/orders", "region": "us-east-1"}
    settings = {"env.TOKEN": "of-the-owner", "source": [source]}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        path = f"/v1/functions/secretive/secrets/{name}"
        assert (await gateway.client.put(path, json={"value": "any"})).status_code < 300
    function = await gateway.deploy("def handler(event):\n    return 1\n", settings, name="secretive")
    await function.logged("source orders: ")
    read = await keyed(scopes=["read"])
    assert "pilotflame_workers" in (await read.get("/metrics")).text
    assert (await read.get("/v1/functions")).status_code == 200
    status = await read.get("/v1/functions/secretive")
    assert status.json()["settings"]["env"] == {}
    assert (status.json()["sources"], len((await function.status())["sources"])) == ([], 1)
    assert "functions/secretive" in [log["name"] for log in (await read.get("/v1/logs")).json()["logs"]]
    document = (await read.get("/openapi.json")).json()
    changing = [
        (method.upper(), re.sub(r"{\w+}", "x", path.replace("{function}", "secretive")))
        for path, methods in document["paths"].items()
        for method in methods
        if method in ("post", "put", "delete", "patch")
    ]
    assert len(changing) > 10
    for method, path in [*changing, ("GET", "/v1/functions/secretive/logs"), ("GET", "/v1/keys")]:
        assert (await read.request(method, path)).status_code == 403, (method, path)
    narrow = await keyed(scopes=["read"], functions=["mine"])
    assert [one["name"] for one in (await narrow.get("/v1/functions")).json()["functions"]] == ["mine"]
    assert [one["name"] for one in (await narrow.get("/v1/logs")).json()["logs"]] == ["functions/mine"]
    assert (await narrow.get("/metrics")).status_code == 403
    await gateway.client.delete("/v1/functions/secretive")


async def test_a_key_for_one_function_cannot_discover_others(gateway: Gateway, keyed: Opened):
    await Function("theirs", gateway.client, {}).answer("a word of theirs")
    mine = await keyed(scopes=["invoke", "deploy"], functions=["mine"])
    for method, path in ROUTES:
        answers = []
        for name in ("theirs", "absent"):
            same = {"X-Request-Id": "same"}
            response = await mine.request(
                method, path.format(f=name), content=b'{"value": "x"}', headers=same
            )
            assert response.status_code == 404, path
            headers = {
                key: value for key, value in response.headers.items() if key not in ("date", "content-length")
            }
            answers.append((response.text.replace(name, "?"), headers))
        assert answers[0] == answers[1], path
        assert failure(response)["type"] == "unknown_function"
    assert (await gateway.client.get("/v1/functions/theirs")).status_code == 200


async def test_a_key_for_one_function_cannot_reach_the_jobs_of_others(gateway: Gateway, keyed: Opened):
    job = (await gateway.client.post("/v2/theirs/run", json={"input": "a word of theirs"})).json()["id"]
    absent = job[:-4] + ("aaaa" if job[-4:] != "aaaa" else "bbbb")
    mine = await keyed(scopes=["invoke", "deploy"], functions=["mine"])
    for method, path in [
        ("GET", "status"), ("GET", "stream"), ("POST", "cancel"), ("POST", "retry"),
    ]:  # fmt: skip
        answers = [
            await mine.request(method, f"/v2/mine/{path}/{one}", headers={"X-Request-Id": "same"})
            for one in (job, absent)
        ]
        assert [answer.status_code for answer in answers] == [404, 404], path
        assert answers[0].text.replace(job, "?") == answers[1].text.replace(absent, "?"), path
    assert job not in (await mine.get("/v2/mine/requests")).text
    assert (await gateway.client.get(f"/v2/theirs/status/{job}")).json()["id"] == job


def without_id(response: httpx.Response) -> dict[str, Any]:
    """Return an error's body without the request id, which must be there and differs each time."""
    body: dict[str, Any] = response.json()
    assert body["error"].pop("request_id") == response.headers["X-Request-Id"]
    return body


async def test_a_missing_function_and_a_hidden_one_give_the_same_404(gateway: Gateway, keyed: Opened):
    everywhere, mine = await keyed(scopes=["deploy"]), await keyed(scopes=["deploy"], functions=["mine"])
    for path in ("/v1/functions/absent", "/v1/functions/absent/logs"):
        assert without_id(await everywhere.get(path)) == without_id(await mine.get(path))


async def test_an_unknown_function_names_the_closest_ones_that_the_key_covers(
    gateway: Gateway, keyed: Opened
):
    everywhere = await keyed(scopes=["invoke", "deploy"])
    mine = await keyed(scopes=["invoke"], functions=["mine", "absent"])
    for method, path in [
        ("POST", "/invoke/{f}"),
        ("GET", "/v1/functions/{f}"),
        ("POST", "/v2/{f}/run"),
    ]:
        found = failure(await everywhere.request(method, path.format(f="theirz"), json={}))
        assert found["remedy"].startswith("Did you mean 'theirs'?"), path
    for wanted in ("theirz", "theirs", "abzent"):
        assert "mean" not in failure(await mine.post(f"/invoke/{wanted}"))["remedy"]
    assert failure(await mine.post("/invoke/mime"))["remedy"].startswith("Did you mean 'mine'?")
    # A page of another origin may call functions but not list them, so its error names no other function.
    page = {"Origin": "http://localhost:3000"}
    assert "mean" not in failure(await everywhere.post("/invoke/theirz", headers=page))["remedy"]


async def test_lists_hold_only_what_the_key_covers(gateway: Gateway, keyed: Opened):
    mine = await keyed(scopes=["invoke", "deploy"], functions=["mine", "absent"])
    everything = await keyed(scopes=["deploy"])
    assert [found["name"] for found in (await mine.get("/v1/functions")).json()["functions"]] == ["mine"]
    assert len((await everything.get("/v1/functions")).json()["functions"]) == 2
    described = (await mine.get("/openapi.json")).text
    assert "/invoke/mine" in described
    assert "theirs" not in described


async def test_a_deploy_under_a_name_that_the_key_does_not_cover_is_refused(
    gateway: Gateway, keyed: Opened, tmp_path: Path
):
    mine = await keyed(scopes=["deploy"], functions=["mine"])
    (tmp_path / "handler.py").write_text(ECHO)
    said = []
    for name in ("theirs", "absent"):
        error = failure(
            await mine.post("/v1/functions", json={"path": str(tmp_path), "overrides": {"name": name}})
        )
        assert (error.pop("status"), error["type"]) == (403, "forbidden")
        assert error.pop("request_id")
        said.append(str(error).replace(name, "?"))
    assert said[0] == said[1]
    # A function with `after` reveals the calls of the other function, so the key has to cover both.
    after = {"name": "mine", "after": ["theirs"]}
    error = failure(await mine.post("/v1/functions", json={"path": str(tmp_path), "overrides": after}))
    assert (error["status"], error["message"]) == (
        403,
        "This API key does not cover a function named 'theirs'.",
    )
    assert "absent" not in (await gateway.client.get("/v1/functions")).text
    assert not list((gateway.state / "staging").iterdir())
    response = await mine.post("/v1/functions", json={"path": str(tmp_path), "overrides": {"name": "mine"}})
    assert response.status_code == 201


async def test_an_expired_key_is_refused(gateway: Gateway):
    key = await made(gateway, expires_in_s=1e-6)
    async with opened(gateway, key) as client:
        assert (await client.post("/invoke/mine", json=1)).status_code == 401


# -- quotas


async def test_over_the_rate_is_refused_until_retry_after(keyed: Opened):
    client = await keyed(rate_per_s=2.0, burst=2)
    answers = [await client.post("/invoke/mine", json=n) for n in range(4)]
    over = next(response for response in answers if response.status_code != 200)
    error = failure(over)
    assert (error["status"], error["type"]) == (429, "quota_exceeded")
    await asyncio.sleep(int(over.headers["Retry-After"]))
    assert (await client.post("/invoke/mine", json=1)).status_code == 200


async def statuses(gateway: Gateway, key: dict[str, Any], *headers: str) -> list[int]:
    """Send four calls with a key, each in one write. Return their statuses."""
    lines = [f"Authorization: Bearer {key['key']}", "Host: localhost", "Content-Length: 1", *headers]
    call = "\r\n".join(["POST /invoke/mine HTTP/1.1", *lines, "", "1"]).encode()
    reader, writer = await asyncio.open_connection(*gateway.address)
    found = []
    for _ in range(4):
        writer.write(call)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split()[0]))
        found.append(int(head.split()[1]))
    writer.close()
    return found


@pytest.mark.parametrize(
    ("refused", "status"), [({"scopes": ["deploy"]}, 403), ({"functions": ["theirs"]}, 404)], ids=str
)
async def test_a_refused_call_takes_one_token(gateway: Gateway, refused: dict[str, Any], status: int):
    key = await made(gateway, rate_per_s=0.001, burst=3, **refused)
    assert await statuses(gateway, key) == [status, status, status, 429]


async def test_a_call_that_asks_for_more_than_an_output_takes_one_token(gateway: Gateway):
    key = await made(gateway, rate_per_s=0.001, burst=3)
    assert await statuses(gateway, key, "Prefer: wait=1") == [200, 200, 200, 429]


async def test_over_the_concurrency_is_refused_while_it_lasts(gateway: Gateway, keyed: Opened, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
    await gateway.deploy(source, {"scale.max": 2}, name="slow", gate=gate)
    client, other = await keyed(concurrency=1), await keyed()
    running = asyncio.create_task(client.post("/invoke/slow", json=1))
    await gate.next()
    over = await client.post("/invoke/mine", json=1)
    assert failure(over)["type"] == "quota_exceeded"
    assert int(over.headers["Retry-After"]) >= 1
    assert (await other.post("/invoke/mine", json=1)).status_code == 200
    gate.open()
    assert (await running).json() == 1
    assert (await client.post("/invoke/mine", json=1)).status_code == 200
    told = (await gateway.client.get("/metrics")).text
    assert 'pilotflame_refusals_total{function="mine",reason="quota_exceeded"}' in told


async def test_a_caller_that_disconnects_frees_its_concurrency(gateway: Gateway, keyed: Opened, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
    await gateway.deploy(source, name="left", gate=gate)
    client = await keyed(concurrency=1)
    running = asyncio.create_task(client.post("/invoke/left", json=1))
    await gate.next()
    running.cancel()

    async def let_in() -> bool:
        return (await client.post("/invoke/mine", json=1)).status_code == 200

    await until(let_in, "his place, free again")


# -- what is stored


async def test_the_last_use_is_stored_coarsely(gateway: Gateway):
    key, began_s = await made(gateway), time.time()
    assert key["last_used_at"] is None
    async with opened(gateway, key) as client:
        await client.post("/invoke/mine", json=1)

    async def saved() -> float | None:
        keys = json.loads((gateway.state / "access" / "keys.json").read_text())["keys"]
        return next(known["last_used_s"] for known in keys if known["id"] == key["id"])

    await until(saved, "the time of its use, in the file")
    assert await saved() in {at_s - at_s % USE_GRAIN_S for at_s in (began_s, time.time())}


async def test_an_open_gateway_requires_no_key(state: Path):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(ECHO)
        response = await function.call(1, Authorization="Bearer whatever")
        assert response.json() == 1


async def test_a_chosen_id_belongs_to_its_key(gateway: Gateway, keyed: Opened):
    """Two callers choose the same id. Neither can notice the other's prediction."""
    mine = await keyed(scopes=["invoke"], functions=["mine"])
    theirs = await keyed(scopes=["invoke"], functions=["theirs"])
    made_here = [
        await caller.put("/cog/predictions/order-17", json={"input": {"value": word}, "version": function})
        for caller, function, word in ((mine, "mine", "a"), (theirs, "theirs", "b"))
    ]
    assert [response.status_code for response in made_here] == [200, 200]
    assert [response.json()["id"] for response in made_here] == ["order-17", "order-17"]
    for caller, response in zip((mine, theirs), made_here, strict=True):
        assert (await caller.get("/cog/predictions/order-17")).json() == response.json()
    nobody = await keyed(scopes=["invoke"], functions=["mine"])
    assert failure(await nobody.get("/cog/predictions/order-17"))["type"] == "unknown_job"


# -- web pages of other origins, and names of others that resolve to this machine

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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_gateway() -> AsyncIterator[Gateway]:
    """Yield a gateway without keys."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0) as found:
            yield found


@pytest.mark.parametrize("sent", PAGES, ids="-".join)
async def test_a_web_page_of_another_origin_is_refused(
    open_gateway: Gateway, tmp_path: Path, sent: dict[str, str]
):
    function = await open_gateway.deploy(ECHO, name="echo")
    (tmp_path / "handler.py").write_text(ECHO)
    client = open_gateway.client
    archive = {"Content-Type": "application/gzip"}
    for response in (
        await client.post("/v1/functions", content=pack(tmp_path), headers={**archive, **sent}),
        await client.post(function.path, content=b"1", headers={"Content-Type": "text/plain", **sent}),
        await client.post(
            f"/lambda/2015-03-31/functions/{function.name}/invocations", content=b"1", headers=sent
        ),
        await client.get("/v1/functions", headers=sent),
        await client.get("/nothing/here", headers=sent),
    ):
        assert response.status_code == 403
        assert "Without API keys" in response.text
    error = failure(await client.get("/v1/functions", headers=sent))
    assert (error["type"], "pilotflame keys create" in error["remedy"]) == ("forbidden", True)
    assert [one["name"] for one in (await client.get("/v1/functions")).json()["functions"]] == [function.name]
    assert (await client.get("/healthz", headers=sent)).status_code == 200


async def test_a_page_of_this_machine_is_accepted(open_gateway: Gateway):
    function = await open_gateway.deploy(ECHO, name="echo")
    headers = {"Origin": "http://localhost:3000", "Sec-Fetch-Site": "same-site"}
    assert (await open_gateway.client.post(function.path, json=1, headers=headers)).json() == 1


async def test_with_a_key_any_name_works_but_no_page_of_another_origin(state: Path):
    async with gateway_here(state, auth="always") as gateway:
        # On the control socket, the Host "home" is accepted.
        async with gateway.at_home() as home:
            key = (await home.post("/v1/keys", json={"name": "x", "scopes": ["admin"]})).json()["key"]
        headers = {"Host": "gateway.example", "Authorization": f"Bearer {key}"}
        assert (await gateway.client.get("/v1/functions", headers=headers)).status_code == 200
        for page in ({"Origin": "https://example.org"}, {"Sec-Fetch-Site": "same-site"}):
            error = failure(await gateway.client.get("/v1/functions", headers=headers | page))
            assert (error["type"], "Without API keys" in error["message"]) == ("forbidden", False)


async def test_the_control_socket_needs_its_key(gateway: Gateway):
    key = gateway.state / "run" / "own.key"
    assert key.stat().st_mode & 0o777 == 0o600
    transport = httpx.AsyncHTTPTransport(uds=str(gateway.state / "run" / "own.sock"))
    async with httpx.AsyncClient(base_url="http://localhost", transport=transport) as client:
        await refused_all(client, ("mine",))
        for sent, status in ((b"x", 401), (b"\xff", 401), (key.read_bytes(), 200)):
            headers = [(CONTROL_KEY.encode(), sent)]
            assert (await client.get("/v1/keys", headers=headers)).status_code == status
            assert (await gateway.client.get("/v1/keys", headers=headers)).status_code == 200
        async with httpx.AsyncClient(base_url=gateway.url) as remote:
            assert (await remote.get("/v1/keys", headers=headers)).status_code == 401


async def test_on_the_control_socket_any_name_works(open_gateway: Gateway):
    async with open_gateway.at_home() as home:
        assert (await home.get("/v1/functions")).status_code == 200


async def test_tracebacks_reach_owners_and_the_log_but_no_caller(gateway: Gateway, keyed: Opened):
    source = "def handler(event):\n    hidden_word = event\n    raise ValueError('no') from KeyError(hidden_word)\n"
    function = await gateway.deploy(source, name="raises")
    streamed = await gateway.deploy(
        "def handler(event):\n    yield 1\n    raise ValueError('no')\n", name="breaks"
    )
    invoke, deploy = await keyed(scopes=["invoke"]), await keyed(scopes=["invoke", "deploy"])
    narrow = await keyed(scopes=["invoke", "deploy"], functions=["raises"])
    as_lambda, as_cog = "/lambda/2015-03-31/functions/raises/invocations", "/cog/predictions?function=raises"
    asked = [
        await invoke.post("/invoke/raises", json=1),
        await invoke.post("/invoke/breaks", json=1),
        await invoke.post(as_lambda, json=1),
        await invoke.post(as_cog, json={"input": 1}),
        await invoke.post("/v2/raises/runsync", json={"input": 1}),
        await narrow.post("/invoke/breaks", json=1),
        # aiohttp reads a call with this header, because it is not a plain call.
        await invoke.post("/invoke/raises", json=1, headers={"Prefer": "handling=lenient"}),
    ]
    job = (await invoke.post("/v2/raises/run", json={"input": 1})).json()["id"]
    await function.logged(job)
    asked.append(await invoke.get(f"/v2/raises/status/{job}"))
    for response in asked:
        assert "ValueError" in response.text or response.status_code in (200, 404), response.text
        assert "hidden_word" not in response.text
        assert "Traceback" not in response.text, response.url
        assert "stackTrace" not in response.text
    error = failure(asked[0])
    assert error["message"].endswith("ValueError: no")
    assert error["request_id"] == asked[0].headers["X-Request-Id"]
    for client in (deploy, narrow, gateway.client):
        assert "hidden_word" in failure(await client.post("/invoke/raises", json=1))["details"]["traceback"]
    assert "hidden_word" in (await deploy.post(as_lambda, json=1)).text
    assert "traceback" in (await deploy.post("/invoke/breaks", json=1)).text
    logged = await function.logged(asked[0].headers["X-Request-Id"])
    assert (logged["level"], "hidden_word" in logged["text"]) == ("error", True)
    for name in (function.name, streamed.name):
        await gateway.client.delete(f"/v1/functions/{name}")

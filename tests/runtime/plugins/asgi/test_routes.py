"""Web apps over real HTTP: the app gets each request as it was sent, and its response reaches the caller unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from live import LIMIT_S, Function, Gate, Gateway, failure, gateway_here, until
from pilotflame.runtime.calls.serving import time_limits
from pilotflame.runtime.plugins.asgi.messages import PART_BYTES

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Replies with the request that the app got.
ECHO = """
import json

async def body_of(receive):
    parts = []
    while True:
        message = await receive()
        assert message["type"] == "http.request", message
        parts.append(message["body"])
        if not message["more_body"]:
            return parts

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        raise RuntimeError("no lifespan")
    parts = await body_of(receive)
    shown = {key: str(scope[key]) for key in ("method", "path", "raw_path", "query_string", "root_path", "scheme",
                                              "http_version", "client", "server")}
    shown["headers"] = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    shown["size"] = sum(map(len, parts))
    shown["parts"] = len(parts)
    headers = [(b"content-type", b"application/json"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"x-any", b"\\xe9\\xff"),
               (b"connection", b"close"), (b"x-worker-id", b"mine"), (b"server", b"me")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(shown).encode()})
"""

# Each path is a case.
CASES = """
import asyncio, gate

async def app(scope, receive, send):
    if scope["type"] != "http":
        raise RuntimeError
    async def start(status=200, *headers):
        await send({"type": "http.response.start", "status": status, "headers": headers})
    async def body(part=b"", more=False):
        await send({"type": "http.response.body", "body": part, "more_body": more})
    case = scope["path"].removeprefix(scope["root_path"])
    if case == "/stream":
        await start()
        await body(b"one", True)
        await gate.wait_async("begun")
        await body(b"two", True)
        await body()
    elif case == "/endless":
        await start()
        try:
            while True:
                await body(b"x" * 100_000, True)
        except OSError:
            gate.say("gone")
            raise
    elif case == "/waits":
        await receive()
        gate.say("begun")
        gate.say((await receive())["type"])
        await start()
        await body()
    elif case == "/background":
        await start()
        await body(b"done")
        await gate.wait_async("after")
        gate.say("ended")
    elif case == "/blocks":
        await start()
        await body(b"done")
        gate.wait("after")
        gate.say("ended")
    elif case == "/fails":
        raise ValueError("a secret")
    elif case == "/fails-late":
        await start()
        await body(b"x" * 10, True)
        raise ValueError("a secret")
    elif case == "/fails-after":
        await start(418)
        await body(b"tea")
        raise ValueError("after the response")
    elif case == "/silent":
        pass
    elif case == "/unfinished":
        await start()
        await body(b"x", True)
    elif case == "/twice":
        await start()
        await start()
    elif case == "/injects":
        await start(200, (b"x", b"1\\r\\ny: 2"))
        await body()
    elif case == "/short":
        await start(200, (b"content-length", b"10"))
        await body(b"x")
    elif case == "/long":
        await start(200, (b"content-length", b"1"))
        await body(b"xyz")
    elif case == "/digits":
        await start(200, (b"content-length", b"1" * 5000))
        await body(b"x")
    elif case == "/status":
        status = int(scope["query_string"])
        await start(status, (b"location", b"/there"), (b"content-length", b"4"))
        await body(b"body")
    elif case == "/early":
        await start(413)
        await body(b"no")
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo(gateway: Gateway) -> Function:
    return await gateway.deploy(None, {"asgi": "app:app"}, files={"app.py": ECHO})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cases(gateway: Gateway) -> Function:
    return await gateway.deploy(None, {"asgi": "app:app"}, files={"app.py": CASES})


# Run the tests with and without the header Origin, because the gateway's code serves requests of web pages in another way.
PATHS = pytest.mark.parametrize("headers", [{}, {"Origin": "http://localhost:1"}], ids=["plain", "page"])


async def test_a_request_reaches_the_app_as_it_was_sent(gateway: Gateway, echo: Function) -> None:
    path = f"/asgi/{echo.name}/a%20b/%C3%A9?x=%20&y=1"
    headers = [
        (b"X-Any", b"\xe9\xff"),
        (b"X-Twice", b"1"),
        (b"X-Twice", b"2"),
        (b"Authorization", b"mine"),
        (b"TE", b"x"),
    ]
    response = await gateway.client.request("REPORT", path, headers=headers, content=b"12345")
    assert response.status_code == 200, response.text
    found = response.json()
    root = f"/asgi/{echo.name}"
    assert found["method"] == "REPORT"
    assert found["path"] == f"{root}/a b/é"
    assert found["raw_path"] == str(f"{root}/a%20b/%C3%A9".encode())
    assert found["query_string"] == str(b"x=%20&y=1")
    assert (found["root_path"], found["scheme"], found["http_version"]) == (root, "http", "1.1")
    assert found["client"].startswith("('127.0.0.1', ")
    assert found["server"] == str(gateway.address)
    assert (found["size"], found["parts"]) == (5, 1)
    sent = [tuple(header) for header in found["headers"]]
    for header in [("x-any", "\xe9\xff"), ("x-twice", "1"), ("x-twice", "2"), ("authorization", "mine")]:
        assert header in sent
    assert not {"te", "connection"} & {name for name, _ in sent}


async def test_a_response_reaches_the_caller_as_it_was_sent(gateway: Gateway, echo: Function) -> None:
    response = await gateway.client.get(f"/asgi/{echo.name}/", headers={"X-Request-Id": "r-1"})
    cookies = [value for name, value in response.headers.raw if name == b"set-cookie"]
    assert cookies == [b"a=1", b"b=2"]
    assert (b"x-any", b"\xe9\xff") in response.headers.raw
    assert response.headers["content-type"] == "application/json"
    assert "connection" not in response.headers
    assert response.headers["server"] == "me"
    assert response.headers.get_list("x-worker-id") == ["mine"]
    assert response.headers["x-request-id"] == "r-1"
    assert response.headers["x-cold-start"] in ("true", "false")
    assert "exec;dur=" in response.headers["server-timing"]
    assert response.headers["date"]
    assert int(response.headers["content-length"]) == len(response.content)


async def test_the_root_ends_with_a_slash(gateway: Gateway, echo: Function) -> None:
    response = await gateway.client.get(f"/asgi/{echo.name}?x=1")
    assert response.status_code == 308
    assert response.headers["location"] == f"/asgi/{echo.name}/?x=1"


async def slowly(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def test_bodies_of_any_length_arrive(gateway: Gateway, deploy_app: Callable[..., Any]) -> None:
    function = await deploy_app(ECHO, {"max_body_bytes": 5_000_000})
    path = f"/asgi/{function.name}/"
    for size in (0, 1, 65_536, 65_537, 5_000_000):
        found = (await gateway.client.post(path, content=b"x" * size)).json()
        assert found["size"] == size
        assert (found["parts"] == 1) == (size <= 65_536)
        found = (await gateway.client.post(path, content=slowly(b"x" * size))).json()
        assert found["size"] == size
    expecting = {"Expect": "100-continue"}
    assert (await gateway.client.post(path, content=b"x" * 9, headers=expecting)).json()["size"] == 9


async def test_a_long_body_is_refused(gateway: Gateway, deploy_app: Callable[..., Any]) -> None:
    function = await deploy_app(ECHO, {"max_body_bytes": 100_000})
    path = f"/asgi/{function.name}/"
    error = failure(await gateway.client.post(path, content=b"x" * 100_001))
    assert (error["status"], error["type"]) == (413, "input_too_large")
    error = failure(await gateway.client.post(path, content=slowly(*[b"x" * 10_000] * 20)))
    assert (error["status"], error["type"]) == (413, "input_too_large")


@PATHS
async def test_a_stream_is_sent_while_it_is_made(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, headers: dict[str, str]
) -> None:
    function = await deploy_app(CASES, gate=gate)
    async with gateway.client.stream("GET", f"/asgi/{function.name}/stream", headers=headers) as response:
        parts = response.aiter_raw()
        assert await anext(parts) == b"one"
        (await gate.next("begun")).go()
        assert b"".join([part async for part in parts]) == b"two"


@PATHS
async def test_a_caller_that_leaves_ends_the_app(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, headers: dict[str, str]
) -> None:
    function = await deploy_app(CASES, gate=gate)
    async with gateway.client.stream("GET", f"/asgi/{function.name}/endless", headers=headers) as response:
        await anext(response.aiter_raw())
    await gate.next("gone")
    call = asyncio.create_task(gateway.client.get(f"/asgi/{function.name}/waits", headers=headers))
    await gate.next("begun")
    call.cancel()
    await gate.next("http.disconnect")
    await function.settled(ready=1)
    # An app that ends because its caller has left logs no error.
    assert not [line for line in await function.lines() if line["level"] == "error"]


async def test_a_slow_reader_does_not_fill_the_gateway(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate
) -> None:
    function = await deploy_app(CASES, gate=gate)
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(f"GET /asgi/{function.name}/endless HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    await reader.readuntil(b"\r\n\r\n")
    assert gateway.server is not None
    live = gateway.server.functions.get(function.name)
    [invocation] = [call for replica in live.workers.replicas for call in replica.outstanding.calls.values()]
    stream = invocation.stream
    assert stream is not None

    async def full() -> bool:
        # The stream has no credit for another piece, so pieces wait in the worker.
        return not stream._credit._fits(PART_BYTES)

    await until(full, "a full stream")
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    await gate.next("gone")


@pytest.mark.parametrize("case", ["background", "blocks"])
async def test_background_work_goes_on_after_the_response(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, case: str
) -> None:
    function = await deploy_app(CASES, gate=gate)
    async with asyncio.timeout(LIMIT_S):
        assert (await gateway.client.get(f"/asgi/{function.name}/{case}")).text == "done"
    arrival = await gate.next("after")
    assert (await function.status())["in_flight"] == 1
    arrival.go()
    await gate.next("ended")
    await function.settled(ready=1, in_flight=0)


@pytest.mark.parametrize("case", ["background", "blocks"])
async def test_the_end_of_background_work_that_takes_too_long_is_named(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(time_limits, "CANCEL_GRACE_S", 0.1)
    function = await deploy_app(CASES, {"timeout_s": 1}, gate=gate)
    assert (await gateway.client.get(f"/asgi/{function.name}/{case}")).text == "done"
    await gate.next("after")
    line = await function.logged("the work of a call after its response did not end in time")
    assert "signal 9" in line["text"]
    # The caller got its response before the worker was killed, so the call counts as a success.
    status = await function.settled(ready=0, in_flight=0)
    assert status["invocations"] == {"http": {"200": 1}}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("fails", "ValueError: a secret"),
        ("silent", "without starting a response"),
        ("twice", "expected a body"),
        ("injects", "not valid in HTTP"),
        ("long", "not as long as its Content-Length"),
        ("short", "not as long as its Content-Length"),
        ("digits", "sent the Content-Length"),
        ("status?100", "no final status"),
    ],
)
@PATHS
async def test_an_app_that_fails_is_an_error(
    gateway: Gateway, cases: Function, case: str, message: str, headers: dict[str, str]
) -> None:
    error = failure(await gateway.client.get(f"/asgi/{cases.name}/{case}", headers=headers))
    assert error["status"] == 500, error
    assert message in error["message"]
    assert "traceback" not in json.dumps(error)


async def test_the_trace_of_a_failure_is_in_the_log(gateway: Gateway, cases: Function) -> None:
    await gateway.client.get(f"/asgi/{cases.name}/fails")
    assert "app.py" in (await cases.logged('raise ValueError(\\"a secret\\")'))["text"]


@pytest.mark.parametrize("case", ["fails-late", "unfinished"])
@PATHS
async def test_a_response_that_breaks_off_is_not_ended(
    gateway: Gateway, cases: Function, case: str, headers: dict[str, str]
) -> None:
    with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
        await gateway.client.get(f"/asgi/{cases.name}/{case}", headers=headers)


async def test_an_app_may_fail_after_its_response(gateway: Gateway, cases: Function) -> None:
    response = await gateway.client.get(f"/asgi/{cases.name}/fails-after")
    assert (response.status_code, response.text) == (418, "tea")
    await cases.logged("after the response")


@pytest.mark.parametrize(
    ("method", "status", "body", "length"),
    [
        ("GET", 404, b"body", "4"),
        ("GET", 304, b"", "4"),
        ("GET", 204, b"", None),
        ("HEAD", 200, b"", "4"),
        ("GET", 307, b"body", "4"),
        ("GET", 799, b"body", "4"),
    ],
)
@PATHS
async def test_responses_without_a_body_have_none(
    gateway: Gateway, cases: Function, method: str, status: int, body: bytes, length: str | None,
    headers: dict[str, str],
) -> None:  # fmt: skip
    response = await gateway.client.request(method, f"/asgi/{cases.name}/status?{status}", headers=headers)
    assert (response.status_code, response.content) == (status, body)
    assert response.headers.get("content-length") == length
    assert response.headers["location"] == "/there"
    # A body that was sent by mistake would be read as the beginning of the next response.
    assert (await gateway.client.get(f"/asgi/{cases.name}/status?201")).status_code == 201


async def test_a_caller_of_http_1_0_gets_the_whole_stream(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate
) -> None:
    function = await deploy_app(CASES, gate=gate)
    gate.open()
    reader, writer = await asyncio.open_connection(*gateway.address)
    writer.write(f"GET /asgi/{function.name}/stream HTTP/1.0\r\n\r\n".encode())
    async with asyncio.timeout(LIMIT_S):
        response = await reader.read()
    assert response.endswith(b"\r\n\r\nonetwo")
    writer.close()


async def test_a_page_of_another_origin_gets_the_headers_of_cors(gateway: Gateway, echo: Function) -> None:
    response = await gateway.client.get(f"/asgi/{echo.name}/", headers={"Origin": "http://localhost:1"})
    assert response.headers["access-control-allow-origin"] == "http://localhost:1"
    assert response.headers["server"] == "me"


async def test_a_response_before_the_body_ends_the_request(gateway: Gateway, cases: Function) -> None:
    response = await gateway.client.post(f"/asgi/{cases.name}/early", content=b"x" * 1_000_000)
    assert (response.status_code, response.text) == (413, "no")


async def test_a_request_that_takes_too_long_ends(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate
) -> None:
    function = await deploy_app(CASES, gate=gate)
    error = failure(
        await gateway.client.get(f"/asgi/{function.name}/waits", headers={"X-Request-Timeout": "0.2"})
    )
    assert error["status"] == 504
    await gate.next("http.disconnect")


async def test_another_function_is_no_app(gateway: Gateway, deploy: Callable[..., Any]) -> None:
    function = await deploy("def handler(event):\n    return event\n")
    error = failure(await gateway.client.get(f"/asgi/{function.name}/"))
    assert (error["status"], error["type"]) == (404, "unknown_route")
    assert failure(await gateway.client.get("/asgi/nothing/"))["status"] == 404


async def test_many_callers_share_a_worker(
    gateway: Gateway, deploy_app: Callable[..., Any], gate: Gate
) -> None:
    function = await deploy_app(CASES, gate=gate)
    path = f"/asgi/{function.name}/background"
    responses = await asyncio.gather(*[gateway.client.get(path) for _ in range(20)])
    pids = {(await gate.next("after")).pid for _ in responses}
    assert len(pids) == 1
    gate.open()


async def deployed_in(home: httpx.AsyncClient, folder: Path, **overrides: Any) -> httpx.Response:
    folder.mkdir(exist_ok=True)
    (folder / "app.py").write_text(ECHO)
    order = {"path": str(folder), "overrides": {"name": folder.name, "asgi": "app:app", **overrides}}
    return await home.post("/v1/functions", json=order)


async def test_the_key_of_the_gateway_does_not_reach_the_app(state: Any) -> None:
    async with gateway_here(state, auth="always") as closed, closed.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "a", "scopes": ["invoke"]})).json()
        closed.client.headers["X-Pilotflame-Control-Key"] = home.headers["X-Pilotflame-Control-Key"]
        assert (await deployed_in(home, state.parent / "echo")).status_code == 201
        assert failure(await closed.client.get("/asgi/echo/"))["status"] == 401
        signed = {"Authorization": "AWS4-HMAC-SHA256 x", "X-Amz-Security-Token": made["key"]}
        for key in ({"Authorization": f"Bearer {made['key']}"}, signed):
            response = await closed.client.get("/asgi/echo/", headers=key)
            assert response.status_code == 200, response.text
            names = {name for name, _ in response.json()["headers"]}
            assert "host" in names
            assert not {"authorization", "x-amz-security-token", "x-pilotflame-control-key"} & names


async def test_a_host_name_belongs_to_its_app(state: Any) -> None:
    async with (
        gateway_here(state, auth="always", app_hosts="*.apps.test,e.apps.test") as closed,
        closed.at_home() as home,
    ):
        made = (await home.post("/v1/keys", json={"name": "a", "scopes": ["invoke"]})).json()
        key = {"Authorization": f"Bearer {made['key']}"}
        assert (await deployed_in(home, state.parent / "echo", hosts="e.apps.test")).status_code == 201
        for path in ("/", "/invoke/echo", "/v1/functions", "/a%20b?x=1", "/asgi/echo/"):
            response = await closed.client.post(path, headers={**key, "Host": "E.apps.test:80"})
            assert response.status_code == 200, response.text
            found = response.json()
            assert found["raw_path"] == str(path.partition("?")[0].encode())
            assert (found["root_path"], found["method"]) == ("", "POST")
        # Without the key, the gateway answers 401. With the key, it answers 404 for a host name of no app.
        assert (await closed.client.get("/", headers={"Host": "e.apps.test"})).status_code == 401
        for host in ("other.apps.test", "echo.localhost"):
            assert (await closed.client.get("/healthz", headers={"Host": host})).status_code == 401
        for host in ("echo.localhost:80", "echo.apps.test"):
            response = await closed.client.get("/x", headers={**key, "Host": host})
            assert (response.json()["path"], response.json()["root_path"]) == ("/x", "")
        assert (
            failure(await closed.client.get("/x", headers={**key, "Host": "other.apps.test"}))["status"]
            == 404
        )
        found = (await closed.client.get("/asgi/echo/", headers=key)).json()
        assert found["root_path"] == "/asgi/echo"
        for host in ("e.apps.test", "echo.apps.test", "later.apps.test"):
            error = failure(await deployed_in(home, state.parent / "two", hosts=host))
            assert "host name of another function" in error["message"]
        error = failure(await deployed_in(home, state.parent / "two", hosts="gateway.test"))
        assert (error["status"], "PILOTFLAME_APP_HOSTS" in error["remedy"]) == (403, True)
        # A rollback does not take back a host name that now belongs to another function.
        assert (await deployed_in(home, state.parent / "echo")).status_code == 201
        assert (await deployed_in(home, state.parent / "two", hosts="e.apps.test")).status_code == 201
        error = failure(await home.post("/v1/functions/echo/rollback"))
        assert "host name of another function" in error["message"]
        assert closed.server is not None
        assert closed.server.functions.hosts.find("e.apps.test") == "two"
        await home.delete("/v1/functions/two")
        for path in ("/healthz", "/console"):
            response = await closed.client.get(path, headers={**key, "Host": "e.apps.test"})
            assert failure(response)["status"] == 404


@pytest.mark.parametrize(
    ("version", "path"),
    [("0.27.0", "/a/b"), ("0.32.0.post1", "/a/b"), ("0.33.0", "/asgi/{}/a/b"), ("1.10.0", "/asgi/{}/a/b")],
)
async def test_old_starlette_matches_paths_below_the_root_path(
    gateway: Gateway, deploy_app: Callable[..., Any], version: str, path: str
) -> None:
    stub = {"starlette/__init__.py": f"__version__ = {version!r}\n"}
    function = await deploy_app("import starlette\n" + ECHO, files=stub)
    shown = (await gateway.client.get(f"/asgi/{function.name}/a/b")).json()
    assert (shown["path"], shown["root_path"]) == (path.format(function.name), f"/asgi/{function.name}")

"""The asynchronous client: calls, maps and jobs of a real gateway, and what it repeats."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from live import Gate, Gateway
from pilotflame import AsyncClient
from pilotflame.errors import (
    BadInput,
    Cancelled,
    DeadlineExceeded,
    FunctionPaused,
    GatewayError,
    GatewayUnreachable,
    HandlerFailed,
    PilotflameError,
    QueueFull,
    Unauthorized,
    UnknownFunction,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANDLER = """
def handler(event):
    if isinstance(event, dict) and "fail" in event:
        raise ValueError(event["fail"])
    return event
"""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest_asyncio.fixture(loop_scope="module")
async def calling(gateway: Gateway) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.url, timeout_s=20) as client:
        yield client


@contextlib.asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    """Run a server that gives `answer` to each request. Yield its address."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def refused(status: int, kind: str, **headers: str) -> web.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return web.json_response({"error": {"type": kind, "message": "No."}}, status=status, headers=named)


# -- calls


async def test_values_and_bytes_arrive_as_they_were(calling: AsyncClient, deploy: Any) -> None:
    function = calling.function((await deploy(HANDLER)).name)
    for value in (None, {"a": ["ä", 1.5, True]}, "\u2028", b"\x00\xff"):
        assert await function.call(value) == value


async def test_a_stream_is_a_list_of_its_pieces(calling: AsyncClient, deploy: Any) -> None:
    source = "def handler(event):\n    yield from range(3)\n    if event: raise ValueError('late')\n"
    function = calling.function((await deploy(source)).name)
    assert await function.call() == [0, 1, 2]
    with pytest.raises(HandlerFailed, match="late"):
        await function.call(1)


async def test_an_error_has_type_status_and_remedy(calling: AsyncClient, deploy: Any) -> None:
    for name in ("nobody", "../v1/functions", ".."):
        with pytest.raises(PilotflameError) as unknown:
            await calling.function(name).call()
        assert unknown.value.status == 404
    with pytest.raises(UnknownFunction) as missing:
        await calling.function("nobody").call()
    assert (missing.value.code, missing.value.status) == ("unknown_function", 404)
    assert "pilotflame list" in missing.value.remedy
    with pytest.raises(HandlerFailed, match="broken"):
        await calling.function((await deploy(HANDLER)).name).call({"fail": "broken"})


@pytest.mark.parametrize("value", [float("nan"), {1, 2}, {"a": b""}])
async def test_a_value_that_is_not_json_is_refused_here(value: Any) -> None:
    async with AsyncClient("http://127.0.0.1:1") as client:
        with pytest.raises(BadInput, match="not JSON"):
            await client.function("f").call(value)
        with pytest.raises(BadInput, match="not JSON"):
            await client.function("f").submit(value)


async def test_the_deadline_ends_a_call(calling: AsyncClient, deploy: Any, gate: Gate) -> None:
    function = await deploy("import gate\ndef handler(event):\n    gate.wait('begun')\n", gate=gate)
    with pytest.raises(DeadlineExceeded):
        await calling.function(function.name).call(timeout_s=0.5)


async def test_a_gateway_that_is_silent_is_left_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotflame.runtime.command.calling.session.GRACE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with AsyncClient(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
            with pytest.raises(DeadlineExceeded, match="did not answer within"):
                await client.function("f").call(timeout_s=0.2)


async def test_a_caller_that_is_cancelled_ends_the_invocation(
    calling: AsyncClient, deploy: Any, gate: Gate
) -> None:
    source = (
        "import asyncio, gate\nasync def handler(event):\n    try:\n        await gate.wait_async('begun')\n"
        "    except asyncio.CancelledError:\n        gate.say('cancelled')\n        raise\n"
    )
    function = await deploy(source, gate=gate)
    call = asyncio.create_task(calling.function(function.name).call())
    await gate.next("begun")
    call.cancel()
    await gate.next("cancelled")


async def test_the_address_and_the_key_of_the_commands(
    gateway: Gateway, deploy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = (await deploy(HANDLER)).name
    monkeypatch.setenv("PILOTFLAME_URL", gateway.url)
    async with AsyncClient() as client:
        assert await client.function(name).call(1) == 1
    monkeypatch.setenv("PILOTFLAME_API_KEY", "no key")
    with pytest.raises(Unauthorized, match="API key"):
        AsyncClient()
    with pytest.raises(GatewayError, match="not a gateway's address"):
        AsyncClient("localhost:8600", api_key="")


# -- other servers than the gateway


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_an_error_that_names_its_target(status: int) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        found = {"Location": "/login?state=secret"} if len(asked) == 1 else {}
        return web.json_response("a login page", status=status if found else 200, headers=found)

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client:
        with pytest.raises(GatewayError, match=f"{status}.*'/login'") as caught:
            await client.function("f").call()
    assert "secret" not in str(caught.value)
    assert len(asked) == 1


async def test_a_proxy_of_the_environment_and_no_password_of_netrc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    async def answer(request: web.Request) -> web.Response:
        names = ("Host", "Authorization", "Proxy-Authorization")
        asked.append(tuple(request.headers.get(name, "") for name in names))
        return web.json_response("answer")

    (tmp_path / "netrc").write_text("default login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr("pilotflame.runtime.command.calling.session.FIRST_RETRY_S", 0.0)
    async with server(answer) as url:
        monkeypatch.setenv("http_proxy", url.replace("http://", "a:b@"))
        for key in ("", "pf_x"):
            async with AsyncClient("http://gateway.invalid", api_key=key) as client:
                assert await client.function("f").call() == "answer"
        async with AsyncClient(url.replace("127.0.0.1", "localhost"), api_key="") as client:
            assert await client.function("f").call() == "answer"
        monkeypatch.setenv("no_proxy", "other.invalid,gateway.invalid")
        async with AsyncClient("http://gateway.invalid") as client:
            with pytest.raises(GatewayUnreachable):
                await client.function("f").call()
    proxied, local = (
        ("gateway.invalid", "", "Basic YTpi"),
        (url.replace("http://127.0.0.1", "localhost"), "", ""),
    )
    assert asked == [proxied, ("gateway.invalid", "Bearer pf_x", "Basic YTpi"), local]


async def test_an_address_with_a_password_beside_a_key() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(request.headers["Authorization"])

    async with server(answer) as url:
        address = url.replace("http://", "http://me:secret@")
        with pytest.raises(Unauthorized, match="user or a password") as caught:
            AsyncClient(address, api_key="pf_x")
        assert "secret" not in str(caught.value)
        async with AsyncClient(address, api_key="") as client:
            assert await client.function("f").call() == "Basic bWU6c2VjcmV0"


# -- repeats


async def test_a_refusal_with_retry_after_is_repeated_at_its_time() -> None:
    asked: list[float] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(asyncio.get_running_loop().time())
        assert float(request.headers["X-Request-Timeout"]) <= 20
        if len(asked) < 3:
            return refused(
                429 if len(asked) == 1 else 503, "queue_full", Retry_After="1", retry_after_ms="150"
            )
        return web.json_response("answer")

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client:
        assert await client.function("f").call() == "answer"
    assert 0.15 <= asked[1] - asked[0] < 1


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (lambda: refused(429, "queue_full", Retry_After="3600"), QueueFull),
        (lambda: refused(503, "function_paused", Retry_After="1"), FunctionPaused),
        (lambda: refused(500, "handler_failed"), HandlerFailed),
        (lambda: refused(504, "deadline_exceeded"), DeadlineExceeded),
        (lambda: web.Response(status=502, text="<h1>Bad gateway</h1>"), GatewayError),
    ],
)
async def test_other_refusals_are_raised_at_once(
    response: Callable[[], web.Response], kind: type[Exception]
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return response()

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client:
        with pytest.raises(kind):
            await client.function("f").call()
    assert len(asked) == 1


async def test_a_call_whose_connection_breaks_is_not_repeated_and_a_job_is() -> None:
    asked: list[tuple[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path, request.headers.get("Idempotency-Key", "")))
        if len(asked) < 3 and request.transport is not None:
            request.transport.abort()
        return web.json_response({"id": "job-1", "status": "IN_QUEUE"}, status=202)

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client:
        with pytest.raises(GatewayError, match="broke"):
            await client.function("f").call()
        assert len(asked) == 1
        assert (await client.function("f").submit()).id == "job-1"
    (_, first), (_, second) = asked[1:]
    assert first == second
    assert first


async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotflame.runtime.command.calling.session.FIRST_RETRY_S", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with AsyncClient(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
            with pytest.raises(GatewayUnreachable, match="No gateway answers"):
                await client.function("f").call()


# -- many


async def test_a_map_keeps_the_order_with_bounded_calls_and_inputs() -> None:
    running, most, read = 0, 0, 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        number = json.loads(await request.read())
        await asyncio.sleep(0.02 if number % 4 == 0 else 0)
        running -= 1
        return web.json_response(number)

    def events() -> Any:
        nonlocal read
        for number in range(1, 100):
            read = number
            yield number

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client:
        found = []
        async for value in client.function("f").map(events(), concurrency=3):
            found.append(value)
            assert read - len(found) <= 3 * 4
    assert found == list(range(1, 100))
    assert most == 3


async def test_a_source_that_waits_for_the_answer_to_its_last_event() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(json.loads(await request.read()))

    answered = asyncio.Semaphore(0)

    async def events() -> AsyncIterator[int]:
        for number in range(3):
            yield number
            await answered.acquire()

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client, asyncio.timeout(5):
        found = list[int]()
        async for value in client.function("f").map(events(), concurrency=1):
            found.append(value)
            answered.release()
    assert found == [0, 1, 2]


async def test_a_source_that_fails_does_so_in_its_place() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(json.loads(await request.read()))

    def events() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    async with server(answer) as url, AsyncClient(url, timeout_s=20) as client:
        answers = client.function("f").map(events())
        assert await anext(answers) == 1
        with pytest.raises(OSError, match="gone"):
            await anext(answers)


async def test_an_error_of_a_map_is_raised_in_its_place(calling: AsyncClient, deploy: Any) -> None:
    function = calling.function((await deploy(HANDLER)).name)
    events = [0, {"fail": "one"}, 2]
    answers = function.map(events)
    assert await anext(answers) == 0
    with pytest.raises(HandlerFailed, match="one"):
        await anext(answers)
    first, error, last = [value async for value in function.map(events, return_exceptions=True)]
    assert (first, last) == (0, 2)
    assert isinstance(error, HandlerFailed)
    with pytest.raises(BadInput, match="concurrency"):
        await anext(function.map(events, concurrency=0))


async def test_a_map_that_is_left_early_ends_its_calls(calling: AsyncClient, deploy: Any) -> None:
    async def endless() -> AsyncIterator[int]:
        number = 0
        while True:
            yield (number := number + 1)

    function = calling.function((await deploy(HANDLER)).name)
    before = asyncio.all_tasks()
    async with contextlib.aclosing(function.map(endless())) as answers:
        assert [await anext(answers), await anext(answers)] == [1, 2]
    assert {task for task in asyncio.all_tasks() - before if "call_in" in repr(task)} == set()


# -- jobs


async def test_a_job_from_submit_to_its_result(calling: AsyncClient, deploy: Any) -> None:
    function = calling.function((await deploy(HANDLER)).name)
    job = await function.submit({"n": 1}, key="one", priority="low", ttl_s=60)
    assert await job.result(20) == {"n": 1}
    assert await job.status() == "COMPLETED"
    assert (await function.submit({"n": 1}, key="one")).id == job.id
    assert await function.job(job.id).result() == {"n": 1}
    with pytest.raises(HandlerFailed, match="broken"):
        await (await function.submit({"fail": "broken"})).result()


async def test_a_job_may_return_bytes(calling: AsyncClient, deploy: Any) -> None:
    function = await deploy("def handler(event):\n    return bytes(event)\n")
    assert await (await calling.function(function.name).submit([0, 255])).result() == b"\x00\xff"


async def test_a_wait_for_a_job_has_a_deadline_and_the_job_goes_on(
    calling: AsyncClient, deploy: Any, gate: Gate
) -> None:
    function = await deploy("import gate\ndef handler(event):\n    gate.wait('begun')\n", gate=gate)
    job = await calling.function(function.name).submit()
    await gate.next("begun")
    with pytest.raises(DeadlineExceeded, match=job.id):
        await job.result(0.1)
    assert await job.status() == "IN_PROGRESS"
    assert await job.cancel() == "CANCELLED"
    with pytest.raises(Cancelled, match=job.id):
        await job.result()

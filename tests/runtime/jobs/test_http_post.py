"""Posting: one request over real sockets; redirects, refusals, and everything a stranger's server may do."""

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from pilotflame.runtime.jobs.http_post import MAX_REDIRECTS, HttpPoster
from pilotflame.runtime.jobs.webhook_addresses import AddressPolicy
from pilotflame.runtime.jobs.webhook_delivery import DeliveryAttempt
from receiver import Held, Receiver, answer, receiving, reset

SECOND = AddressPolicy.parse(["127.0.0.2"])
"""127.0.0.1 stays private: the inside that nobody may reach."""


@pytest_asyncio.fixture
async def inside() -> AsyncIterator[Receiver]:
    async with receiving("127.0.0.1") as receiver:
        yield receiver


@pytest_asyncio.fixture
async def outside() -> AsyncIterator[Receiver]:
    async with receiving("127.0.0.2") as receiver:
        yield receiver


async def post(
    url: str, policy: AddressPolicy = SECOND, timeout_s: float = 20.0, **how: Any
) -> DeliveryAttempt:
    async with HttpPoster(policy, timeout_s=timeout_s, connect_timeout_s=5.0, **how) as poster:
        return await poster.post(url, {"webhook-id": "msg_1"}, b'{"a":1}', 1000.0)


async def test_a_body_arrives_with_its_headers(outside: Receiver) -> None:
    attempt = await post(outside.url + "/hook?x=1")
    assert (attempt.status, attempt.error, attempt.taken, attempt.at_s) == (204, "", True, 1000.0)
    (came,) = outside.came
    assert (came.path, came.body, came.id) == ("/hook", b'{"a":1}', "msg_1")
    assert came.headers["content-type"] == "application/json"
    assert came.headers["user-agent"].startswith("pilotflame/")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_followed_by_the_same_post(outside: Receiver, status: int) -> None:
    async with receiving("127.0.0.2") as other:
        outside.answers = [answer(status, Location=other.url + "/there")]
        assert (await post(outside.url)).taken
        (came,) = other.came
        assert (came.path, came.body, came.id) == ("/there", b'{"a":1}', "msg_1")


async def test_a_redirect_may_be_relative(outside: Receiver) -> None:
    outside.answers = [answer(307, Location="/there")]
    assert (await post(outside.url + "/here")).taken
    assert [came.path for came in outside.came] == ["/here", "/there"]


async def test_a_redirect_to_the_inside_is_refused(outside: Receiver, inside: Receiver) -> None:
    named = inside.url.replace("127.0.0.1", "localhost.localdomain")
    for location in (
        inside.url,
        inside.url.replace("127.0.0.1", "localhost"),
        "file:///etc/passwd",
        "http://[::1",
        named,
    ):
        outside.answers = [answer(307, Location=location)]
        attempt = await post(outside.url, resolver=Names("127.0.0.1"))
        assert (attempt.status, attempt.taken) == (0, False)
        assert attempt.error
    assert inside.came == []


async def test_redirects_come_to_an_end(outside: Receiver) -> None:
    outside.answers = [answer(307, Location=outside.url) for _ in range(9)]
    attempt = await post(outside.url)
    assert "redirected more than" in attempt.error
    assert len(outside.came) == MAX_REDIRECTS + 1


async def test_a_redirect_that_leads_nowhere_is_a_failure(outside: Receiver) -> None:
    outside.answers = [302, 303]
    assert [(await post(outside.url)).status for _ in range(2)] == [302, 303]


class Names(AbstractResolver):
    """Names that mean one address after the other, as an attacker's own name server would have it."""

    def __init__(self, *addresses: str) -> None:
        self._addresses = list(addresses)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        address = self._addresses.pop(0) if len(self._addresses) > 1 else self._addresses[0]
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
        ]

    async def close(self) -> None:
        pass


async def test_a_name_that_means_the_inside_is_refused_at_the_connection(inside: Receiver) -> None:
    url = inside.url.replace("127.0.0.1", "innocent.example")
    attempt = await post(url, resolver=Names("127.0.0.1"))
    assert "may not be sent to its address" in attempt.error
    assert "127.0.0.1" not in attempt.error
    assert inside.came == []


async def test_a_name_that_is_bound_anew_meanwhile_does_not_help(inside: Receiver) -> None:
    port = inside.url.rpartition(":")[2]
    async with receiving("127.0.0.2") as outside:
        del outside  # its address is allowed; nothing more is wanted of it
        resolver = Names("127.0.0.2", "127.0.0.1")
        async with HttpPoster(SECOND, timeout_s=20, connect_timeout_s=5, resolver=resolver) as poster:
            poster._session.connector._use_dns_cache = False  # type: ignore[union-attr]
            errors = [(await poster.post(f"http://x.example:{port}/", {}, b"", 0.0)).error for _ in range(2)]
    assert "may not be sent" not in errors[0]  # refused by the kernel: nobody listens there
    assert "may not be sent" in errors[1]
    assert inside.came == []


async def test_a_proxy_in_the_environment_is_not_asked(
    outside: Receiver, inside: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", inside.url)
    assert (await post(outside.url)).taken
    assert inside.came == []


async def test_no_answer_in_time(outside: Receiver) -> None:
    outside.answers = [Held()]
    attempt = await post(outside.url, timeout_s=0.05)
    assert (attempt.status, attempt.error) == (0, "no answer within 0.05 s")


async def test_a_connection_that_is_reset_or_refused(outside: Receiver) -> None:
    outside.answers = [reset]
    attempt = await post(outside.url)
    assert attempt.status == 0
    assert "Disconnected" in attempt.error or "reset" in attempt.error
    with socket.create_server(("127.0.0.2", 0)) as free:
        url = f"http://127.0.0.2:{free.getsockname()[1]}/"
    assert "Cannot connect" in (await post(url)).error


async def test_retry_after_is_read(outside: Receiver) -> None:
    outside.answers = [
        answer(503, Retry_After="120"),
        answer(429, Retry_After="Thu, 01 Jan 1970 00:17:40 GMT"),
    ]
    assert [(await post(outside.url)).wish_s for _ in range(2)] == [120.0, 60.0]


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\r\n\r\n",
        b"HTTP/9.9 999 \xff\r\n\r\n",
        b"\x16\x03\x01" * 50,
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 100_000,
    ],
)
async def test_noise_is_an_attempt_that_failed(noise: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(noise)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.2", 0)
    async with server:
        attempt = await post(f"http://127.0.0.2:{server.sockets[0].getsockname()[1]}/")
    assert not attempt.taken
    assert attempt.error
    assert attempt.error.isprintable()


async def test_an_answer_without_an_end_is_not_read(outside: Receiver) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Encoding": "gzip"})
        await response.prepare(request)
        block = gzip.compress(b"\0" * 100_000)
        while request.transport is not None and not request.transport.is_closing():
            await response.write(block)
        return response

    outside.answers = [endless]
    assert (await post(outside.url)).taken

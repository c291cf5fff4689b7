"""HTTP POST over real sockets: redirects, refusals, hostile servers; and which addresses and URLs are allowed."""

import asyncio
import gzip
import ipaddress
import socket
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SettingsError, WebhookRefused
from pilotflame.runtime.jobs.webhooks.delivery import DeliveryAttempt
from pilotflame.runtime.jobs.webhooks.http_post import (
    MAX_REDIRECTS,
    AddressPolicy,
    HttpPoster,
    parse_retry_after,
)
from receiver import Held, Receiver, receiving, reset, respond

SECOND = AddressPolicy.parse(["127.0.0.2"])
"""Allows 127.0.0.2. In these tests, 127.0.0.1 is an address of the private network."""


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
    async with HttpPoster(policy, timeout_s=timeout_s, **how) as poster:
        return await poster.post(url, {"webhook-id": "msg_1"}, b'{"a":1}', 1000.0)


async def test_a_body_arrives_with_its_headers(outside: Receiver) -> None:
    attempt = await post(outside.url + "/hook?x=1")
    assert (attempt.status, attempt.error, attempt.at_s) == (204, "", 1000.0)
    (came,) = outside.came
    assert (came.path, came.body, came.id) == ("/hook", b'{"a":1}', "msg_1")
    assert came.headers["content-type"] == "application/json"
    assert came.headers["user-agent"].startswith("pilotflame/")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_followed_by_the_same_post(outside: Receiver, status: int) -> None:
    async with receiving("127.0.0.2") as other:
        outside.responses = [respond(status, Location=other.url + "/there")]
        assert (await post(outside.url)).status == 204
        (came,) = other.came
        assert (came.path, came.body, came.id) == ("/there", b'{"a":1}', "msg_1")


async def test_a_redirect_may_be_relative(outside: Receiver) -> None:
    outside.responses = [respond(307, Location="/there")]
    assert (await post(outside.url + "/here")).status == 204
    assert [came.path for came in outside.came] == ["/here", "/there"]


async def test_a_redirect_to_a_private_address_is_refused(outside: Receiver, inside: Receiver) -> None:
    named = inside.url.replace("127.0.0.1", "localhost.localdomain")
    for location in (
        inside.url,
        inside.url.replace("127.0.0.1", "localhost"),
        "file:///etc/passwd",
        "http://[::1",
        named,
    ):
        outside.responses = [respond(307, Location=location)]
        attempt = await post(outside.url, resolver=Names("127.0.0.1"))
        assert attempt.status == 0
        assert attempt.error
    assert inside.came == []


async def test_redirects_are_limited(outside: Receiver) -> None:
    outside.responses = [respond(307, Location=outside.url) for _ in range(9)]
    attempt = await post(outside.url)
    assert "redirected more than" in attempt.error
    assert len(outside.came) == MAX_REDIRECTS + 1


async def test_a_redirect_without_a_location_is_a_failure(outside: Receiver) -> None:
    outside.responses = [302, 303]
    assert [(await post(outside.url)).status for _ in range(2)] == [302, 303]


class Names(AbstractResolver):
    """Resolves names to one address after the other, as an attacker's name server would."""

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


async def test_a_name_of_a_private_address_is_refused_at_the_connection(inside: Receiver) -> None:
    url = inside.url.replace("127.0.0.1", "innocent.example")
    attempt = await post(url, resolver=Names("127.0.0.1"))
    assert "may not be sent to its address" in attempt.error
    assert "PILOTFLAME_WEBHOOK_NETWORKS" in attempt.error
    assert "127.0.0.1" not in attempt.error
    assert inside.came == []


async def test_dns_rebinding_is_refused(inside: Receiver) -> None:
    port = inside.url.rpartition(":")[2]
    async with receiving("127.0.0.2") as outside:
        # The requests use the port of `inside`, so they do not reach this server.
        del outside
        resolver = Names("127.0.0.2", "127.0.0.1")
        async with HttpPoster(SECOND, timeout_s=20, resolver=resolver) as poster:
            poster._session.connector._use_dns_cache = False  # type: ignore[union-attr]
            errors = [(await poster.post(f"http://x.example:{port}/", {}, b"", 0.0)).error for _ in range(2)]
    # The first connection is allowed, and fails only because no server listens on that port.
    assert "may not be sent" not in errors[0]
    assert "may not be sent" in errors[1]
    assert inside.came == []


async def test_a_proxy_in_the_environment_is_not_used(
    outside: Receiver, inside: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", inside.url)
    assert (await post(outside.url)).status == 204
    assert inside.came == []


async def test_a_response_that_is_late(outside: Receiver) -> None:
    outside.responses = [Held()]
    attempt = await post(outside.url, timeout_s=0.05)
    assert (attempt.status, attempt.error) == (0, "no response within 0.05 s")


async def test_a_connection_that_is_reset_or_refused(outside: Receiver) -> None:
    outside.responses = [reset]
    attempt = await post(outside.url)
    assert attempt.status == 0
    assert "Disconnected" in attempt.error or "reset" in attempt.error
    with socket.create_server(("127.0.0.2", 0)) as free:
        url = f"http://127.0.0.2:{free.getsockname()[1]}/"
    assert "Cannot connect" in (await post(url)).error


async def test_retry_after_is_read(outside: Receiver) -> None:
    outside.responses = [
        respond(503, Retry_After="120"),
        respond(429, Retry_After="Thu, 01 Jan 1970 00:17:40 GMT"),
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
async def test_a_malformed_response_is_a_failed_attempt(noise: bytes) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        writer.write(noise)
        writer.close()

    server = await asyncio.start_server(speak, "127.0.0.2", 0)
    async with server:
        attempt = await post(f"http://127.0.0.2:{server.sockets[0].getsockname()[1]}/")
    assert attempt.status == 0
    assert attempt.error
    assert attempt.error.isprintable()


async def test_an_endless_response_is_not_read(outside: Receiver) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Encoding": "gzip"})
        await response.prepare(request)
        block = gzip.compress(b"\0" * 100_000)
        while request.transport is not None and not request.transport.is_closing():
            await response.write(block)
        return response

    outside.responses = [endless]
    assert (await post(outside.url)).status == 200


def test_retry_after_is_a_number_or_a_date() -> None:
    assert parse_retry_after("120", 1000.0) == 120
    assert parse_retry_after(" 7 ", 1000.0) == 7
    assert parse_retry_after(formatdate(1060, usegmt=True), 1000.0) == 60
    # Without `usegmt`, the date has the zone "-0000".
    assert parse_retry_after(formatdate(1060), 1000.0) == 60
    assert parse_retry_after(formatdate(900, usegmt=True), 1000.0) == 0
    for nonsense in ("", "-5", "soon", "1.5", "Mon, 99 Foo", "９"):
        assert parse_retry_after(nonsense, 1000.0) == 0


@given(
    st.text(max_size=40)
    | st.from_regex(r"[A-Z][a-z]{2}, [0-9]{1,9} Jan [0-9]{1,9} [0-9:]{1,12} ?[A-Z+0-9]{0,6}")
)
def test_any_retry_after_is_parsed(text: str) -> None:
    assert parse_retry_after(text, 1000.0) >= 0


# -- addresses and URLs

PUBLIC = AddressPolicy()

REFUSED = [
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.0.9", "168.63.129.16",
    "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.168.1.1", "198.18.0.1",
    "203.0.113.5", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "fec0::1", "2001:db8::1", "2002:7f00:1::",
    "2001::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:10.0.0.1", "::127.0.0.1", "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "3fff::1", "100::1", "5f00::1", "4000::1",
    "not an address", "",
]  # fmt: skip
ALLOWED = [
    "1.1.1.1",
    "8.8.8.8",
    "172.32.0.1",
    "192.0.1.1",
    "2606:4700::1111",
    "64:ff9b::1.1.1.1",
    "::ffff:8.8.8.8",
]


@pytest.mark.parametrize("address", REFUSED)
def test_an_address_that_is_not_public_is_refused(address: str) -> None:
    assert PUBLIC.fault(address)


@pytest.mark.parametrize("address", ALLOWED)
def test_a_public_address_is_allowed(address: str) -> None:
    assert PUBLIC.fault(address) is None


@given(st.ip_addresses())
def test_an_allowed_address_is_global_for_python_too(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if PUBLIC.fault(str(address)) is None and address not in ipaddress.ip_network("64:ff9b::/96"):
        inner = getattr(address, "ipv4_mapped", None) or address
        assert inner.is_global
        assert not inner.is_multicast


@given(st.ip_addresses(v=4))
def test_an_embedded_ipv4_address_is_judged_the_same(address: ipaddress.IPv4Address) -> None:
    plain = PUBLIC.fault(str(address))
    assert PUBLIC.fault(f"::ffff:{address}") == plain
    assert PUBLIC.fault(f"64:ff9b::{address}") == plain


def test_settings_may_allow_networks() -> None:
    policy = AddressPolicy.parse(["127.0.0.2", "10.0.0.0/8", "fd00::/8"])
    assert policy.fault("127.0.0.2") is None
    assert policy.fault("::ffff:127.0.0.2") is None
    assert policy.fault("127.0.0.1")
    assert policy.fault("10.9.9.9") is None
    assert policy.fault("fd12::1") is None
    with pytest.raises(SettingsError, match=r"10\.0\.0\.1/8"):
        AddressPolicy.parse(["10.0.0.1/8"])


URLS_REFUSED = [
    "", "hook", "/hook", "ftp://example.com/", "file:///etc/passwd", "javascript:1", "http://", "http:///x", "https://:80/",
    "http://user@example.com/", "http://user:hush@example.com/", "http://:hush@example.com/",
    "http://example.com:0/", "http://example.com:99999/", "http://exa mple.com/", "http://example.com/\r\nX: y",
    "http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://017700000001/",
    "http://0/", "http://[::1]/", "http://[::ffff:7f00:1]/", "http://[fe80::1%25eth0]/", "http://localhost/",
    "http://LOCALHOST:80/", "http://localhost./", "http://a.localhost/", "http://169.254.169.254/latest/meta-data",
    "http://[64:ff9b::7f00:1]/", "http://[::1", "http://１２７.0.0.1/", "http://example.com/" + "x" * 2048,
]  # fmt: skip


@pytest.mark.parametrize("url", URLS_REFUSED)
def test_a_url_is_refused_by_its_text(url: str) -> None:
    with pytest.raises(WebhookRefused) as refused:
        PUBLIC.check(url)
    assert "hush" not in str(refused.value)
    assert "PILOTFLAME_WEBHOOK_NETWORKS" in refused.value.remedy


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook?x=1",
        "http://example.com:8080",
        "http://1.1.1.1/",
        "http://münchen.de/",
        "http://dead.beef/",
    ],
)
def test_a_public_url_is_allowed(url: str) -> None:
    assert PUBLIC.check(url).host


@given(st.text() | st.from_regex(r"https?://[\[\]0-9a-fx:.@%#?/\\]{0,20}"))
def test_any_text_is_allowed_or_refused(text: str) -> None:
    try:
        PUBLIC.check(text)
    except WebhookRefused:
        return


def test_a_socket_is_only_created_for_an_allowed_address() -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    with pytest.raises(PermissionError) as refused:
        PUBLIC.socket((*kind, ("10.1.2.3", 80)))
    assert "10.1.2.3" not in str(refused.value)
    PUBLIC.socket((*kind, ("1.1.1.1", 80))).close()
    AddressPolicy.parse(["10.1.2.3"]).socket((*kind, ("10.1.2.3", 80))).close()

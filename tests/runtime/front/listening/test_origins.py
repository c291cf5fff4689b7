"""The address of a client: behind proxies that are trusted, and with headers that the client has forged."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict
from pilotflame.runtime.front.listening.origins import Origins, network_of

ORIGINS = Origins(("10.0.0.0/8", "127.0.0.1", "fd00::/8"))


@pytest.mark.parametrize(
    ("remote", "headers", "client"),
    [
        ("203.0.113.9", [("X-Forwarded-For", "192.0.2.1")], "203.0.113.9"),
        ("", [("X-Forwarded-For", "192.0.2.1")], ""),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [("X-Forwarded-For", "192.0.2.1")], "192.0.2.1"),
        ("::ffff:10.0.0.1", [("X-Forwarded-For", "192.0.2.1:4711")], "192.0.2.1"),
        ("10.0.0.1", [("X-Forwarded-For", "6.6.6.6, 192.0.2.1, 10.0.0.7")], "192.0.2.1"),
        ("10.0.0.1", [("X-Forwarded-For", "6.6.6.6"), ("X-Forwarded-For", "192.0.2.1")], "192.0.2.1"),
        ("10.0.0.1", [("X-Forwarded-For", "10.0.0.9, 10.0.0.8")], "10.0.0.9"),
        ("10.0.0.1", [("X-Forwarded-For", "192.0.2.1, unknown")], "10.0.0.1"),
        ("10.0.0.1", [("X-Forwarded-For", "[2001:db8::1]:80")], "2001:db8::1"),
        ("fd00::1", [("Forwarded", 'for=6.6.6.6, For="[2001:db8::1]:80";proto=https')], "2001:db8::1"),
        ("10.0.0.1", [("Forwarded", 'by=1.1.1.1;for="6, for=192.0.2.1')], "192.0.2.1"),
        ("10.0.0.1", [("Forwarded", "for=_hidden")], "10.0.0.1"),
        ("10.0.0.1", [("Forwarded", "for=192.0.2.1"), ("X-Forwarded-For", "192.0.2.1")], "192.0.2.1"),
        # Only the last 32 addresses are read.
        ("10.0.0.1", [("X-Forwarded-For", "192.0.2.1" + ", 10.0.0.9" * 31)], "192.0.2.1"),
        ("10.0.0.1", [("X-Forwarded-For", "192.0.2.1"), ("X-Forwarded-For", ", 10.0.0.9" * 32)], "10.0.0.9"),
        # The proxy adds only one of the two headers. The caller may have forged the other header, so neither is used.
        ("10.0.0.1", [("Forwarded", "for=6.6.6.6"), ("X-Forwarded-For", "192.0.2.1")], "10.0.0.1"),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_no_trusted_proxy(
    remote: str, headers: list[tuple[str, str]], client: str
) -> None:
    assert ORIGINS.client_of(CIMultiDict(headers), remote) == client


def test_an_ipv6_client_is_its_network() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::2") == "2001:db8::/64"
    assert (network_of("192.0.2.1"), network_of("")) == ("192.0.2.1", "")


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({}, "http://here:8600"),
        ({"X-Forwarded-Proto": "HTTPS, http"}, "https://here:8600"),
        ({"X-Forwarded-Proto": "ftp", "X-Forwarded-Host": "a b"}, "http://here:8600"),
        ({"X-Forwarded-Host": "models.example:8443"}, "http://models.example:8443"),
        ({"X-Forwarded-Proto": "https", "X-Forwarded-Host": "[2001:db8::1]:80"}, "https://[2001:db8::1]:80"),
        ({"Forwarded": "proto=https;host=a.example", "X-Forwarded-Host": "b.example"}, "https://a.example"),
    ],
)
def test_links_begin_with_the_origin_that_a_trusted_proxy_tells(headers: dict[str, str], origin: str) -> None:
    for remote, found in (("10.0.0.1", origin), ("203.0.113.9", "http://here:8600")):
        request = make_mocked_request("GET", "/", headers={"Host": "here:8600", **headers}).clone(
            remote=remote
        )
        assert ORIGINS.of(request) == found
    assert Origins(()).of(request) == "http://here:8600"


@pytest.mark.parametrize("address", [None, "", "unix", "203.0.113.9", "::1"])
def test_other_addresses_are_no_proxies(address: str | None) -> None:
    assert not ORIGINS.trusts(address)
    assert (ORIGINS.trusts_some, Origins(()).trusts_some) == (True, False)
    assert ORIGINS.trusts("fd00::1%eth0")

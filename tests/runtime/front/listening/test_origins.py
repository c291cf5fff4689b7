"""The address of a client: behind proxies that are trusted, and with headers that the client has forged."""

from __future__ import annotations

import pytest
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
        # The proxy adds only one of the headers, and the caller has sent the other one.
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

"""Addresses of webhooks: what may be called, by number and by text, and that a socket is only made for such."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SettingsError, WebhookRefused
from pilotflame.runtime.jobs.webhook_addresses import AddressPolicy

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
TAKEN = [
    "1.1.1.1",
    "8.8.8.8",
    "172.32.0.1",
    "192.0.1.1",
    "2606:4700::1111",
    "64:ff9b::1.1.1.1",
    "::ffff:8.8.8.8",
]


@pytest.mark.parametrize("address", REFUSED)
def test_what_is_not_public_is_refused(address: str) -> None:
    assert PUBLIC.fault(address)


@pytest.mark.parametrize("address", TAKEN)
def test_what_is_public_may_be_called(address: str) -> None:
    assert PUBLIC.fault(address) is None


@given(st.ip_addresses())
def test_never_more_is_allowed_than_python_calls_global(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if PUBLIC.fault(str(address)) is None and address not in ipaddress.ip_network("64:ff9b::/96"):
        inner = getattr(address, "ipv4_mapped", None) or address
        assert inner.is_global
        assert not inner.is_multicast


@given(st.ip_addresses(v=4))
def test_an_address_in_the_clothes_of_version_6_is_the_same(address: ipaddress.IPv4Address) -> None:
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
    "http://user@example.com/", "http://user:geheim@example.com/", "http://:geheim@example.com/",
    "http://example.com:0/", "http://example.com:99999/", "http://exa mple.com/", "http://example.com/\r\nX: y",
    "http://127.0.0.1/", "http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://017700000001/",
    "http://0/", "http://[::1]/", "http://[::ffff:7f00:1]/", "http://[fe80::1%25eth0]/", "http://localhost/",
    "http://LOCALHOST:80/", "http://localhost./", "http://a.localhost/", "http://169.254.169.254/latest/meta-data",
    "http://[64:ff9b::7f00:1]/", "http://[::1", "http://１２７.0.0.1/", "http://example.com/" + "x" * 2048,
]  # fmt: skip


@pytest.mark.parametrize("url", URLS_REFUSED)
def test_a_url_is_refused_when_it_is_submitted(url: str) -> None:
    with pytest.raises(WebhookRefused) as refused:
        PUBLIC.check(url)
    assert "geheim" not in str(refused.value)


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
def test_a_url_of_the_public_is_taken(url: str) -> None:
    assert PUBLIC.check(url).host


@given(st.text() | st.from_regex(r"https?://[\[\]0-9a-fx:.@%#?/\\]{0,20}"))
def test_any_text_is_taken_or_refused(text: str) -> None:
    try:
        PUBLIC.check(text)
    except WebhookRefused:
        return


def test_a_socket_is_only_made_for_what_may_be_called() -> None:
    kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    with pytest.raises(PermissionError) as refused:
        PUBLIC.socket((*kind, ("10.1.2.3", 80)))
    assert "10.1.2.3" not in str(refused.value)
    PUBLIC.socket((*kind, ("1.1.1.1", 80))).close()
    AddressPolicy.parse(["10.1.2.3"]).socket((*kind, ("10.1.2.3", 80))).close()

"""Which addresses a webhook may be sent to: what a stranger names must not be a way into the gateway's own network.

A name proves nothing, since whoever owns it may answer with another address the next time (DNS rebinding). So the
check that counts is made where a socket is made, on the very address that it is about to connect to.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from errno import EACCES
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Self

from yarl import URL

from ...errors import SettingsError, WebhookRefused

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_URL_CHARS = 2048

# From the special-purpose registries of IANA, written out: `is_global` says different things in different Pythons.
_REFUSED_4 = {
    "0.0.0.0/8": "this network",
    "10.0.0.0/8": "private",
    "100.64.0.0/10": "shared by carriers",
    "127.0.0.0/8": "loopback",
    "168.63.129.16/32": "a cloud's metadata",
    "169.254.0.0/16": "link-local, where clouds keep their metadata",
    "172.16.0.0/12": "private",
    "192.0.0.0/24": "reserved",
    "192.0.2.0/24": "documentation",
    "192.31.196.0/24": "reserved",
    "192.52.193.0/24": "reserved",
    "192.88.99.0/24": "reserved",
    "192.168.0.0/16": "private",
    "192.175.48.0/24": "reserved",
    "198.18.0.0/15": "benchmarking",
    "198.51.100.0/24": "documentation",
    "203.0.113.0/24": "documentation",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
}
# Of IPv6 only 2000::/3 is handed out to the public; the rest is refused as a whole.
_REFUSED_6 = {
    "::/128": "unspecified",
    "::1/128": "loopback",
    "fc00::/7": "private",
    "fe80::/10": "link-local",
    "ff00::/8": "multicast",
    "2001::/23": "reserved",
    "2001:db8::/32": "documentation",
    "2002::/16": "6to4",
    "3fff::/20": "documentation",
}
_PUBLIC_6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_REFUSED: Sequence[tuple[Network, str]] = [
    (ip_network(network), reason) for network, reason in (_REFUSED_4 | _REFUSED_6).items()
]


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """Public addresses may be called, and besides these what lies in the `allowed` networks."""

    allowed: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, networks: Sequence[str]) -> Self:
        """From texts as `10.1.0.0/16` or `127.0.0.1`. SettingsError names what is none."""
        try:
            return cls(tuple(ip_network(network) for network in networks))
        except ValueError as error:
            raise SettingsError(
                f"A network that webhooks may be sent to cannot be taken: {error}.",
                remedy="Write it as 10.1.0.0/16, fd00::/8 or 127.0.0.1.",
            ) from error

    def fault(self, address: str) -> str | None:
        """Why that numeric address may not be called; None if it may."""
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            return "not an address"
        inner = _inner(found)
        if any(_within(candidate, network) for network in self.allowed for candidate in (found, inner)):
            return None
        for network, reason in _REFUSED:
            if _within(inner, network):
                return reason
        return None if isinstance(inner, IPv4Address) or inner in _PUBLIC_6 else "reserved"

    def socket(self, info: tuple[Any, ...]) -> socket.socket:
        """A socket for what `getaddrinfo` gave: aiohttp's `socket_factory`. PermissionError if it may not be called."""
        family, kind, protocol, _, address = info
        if reason := self.fault(str(address[0])):
            # An OSError is what the connector expects here: it tries the name's other addresses. The address is not
            # told: whoever names a host would learn what it is within our network.
            raise PermissionError(EACCES, f"webhooks may not be sent to its address: {reason}")
        return socket.socket(family, kind, protocol)

    def check(self, url: str) -> URL:
        """The URL if a webhook may be sent there as far as its text tells, else WebhookRefused.

        Names are not resolved here: what they resolve to is checked each time when it is connected to.
        """
        try:
            parsed = URL(url)
            fault = _text_fault(url, parsed) or self._host_fault(parsed)
        except ValueError as error:
            fault = str(error)
        if fault:
            raise refusal(fault)
        return parsed

    def _host_fault(self, url: URL) -> str | None:
        host = (url.host or "").rstrip(".").lower()
        if host == "localhost" or host.endswith(".localhost"):
            host = "127.0.0.1"
        try:
            # The spellings that C libraries take for an address: 127.1, 0x7f000001, 017700000001.
            address = host if ":" in host else socket.inet_ntoa(socket.inet_aton(host))
        except OSError:
            return None
        reason = self.fault(address)
        return f"its host is {address} ({reason})" if reason else None


def refusal(fault: str) -> WebhookRefused:
    """The error for an address that may not be called."""
    return WebhookRefused(
        f"The webhook may not be sent: {fault}.",
        remedy="Give an http or https URL of a public address; the gateway's settings may allow others.",
    )


def _text_fault(text: str, url: URL) -> str | None:
    if len(text) > MAX_URL_CHARS:
        return f"its URL has more than {MAX_URL_CHARS} characters"
    if not text.isprintable() or " " in text:
        return "its URL has spaces or control characters"
    if url.scheme not in ("http", "https"):
        return "its URL is not of http or https"
    if not url.host:
        return "its URL names no host"
    if url.user is not None or url.password is not None:
        return "its URL has credentials, which would be stored and shown"
    return "its URL names no port that there is" if not url.port else None


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for (mapped, or behind NAT64), else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network

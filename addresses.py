"""Decides which IP addresses may be connected to for a URL that a caller sent.

Without this check, callers could reach the gateway's own network through pilotflame. Checking the host name
of a URL is not enough, since its owner can let it resolve to another address the next time (DNS rebinding).
So the code that opens a socket checks the address that the socket is about to connect to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Self

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

UPLOAD_URL = "PILOTFLAME_UPLOAD_URL"
"""The environment variable of a function with the URL below which it stores output files of predictions."""
INPUT_NETWORKS = "PILOTFLAME_INPUT_NETWORKS"
"""The environment variable of a function that lists networks, separated by commas.

Input files may be fetched from public addresses and from these networks.
"""

# Networks that IANA reserves for special purposes, and one of a cloud. They are listed here because the
# result of `is_global` differs between versions of Python.
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
# Only 2000::/3 of IPv6 is public. Addresses outside it are refused, also if they are not listed here.
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
_REFUSED: Sequence[tuple[IpNetwork, str]] = [
    (ip_network(network), reason) for network, reason in (_REFUSED_4 | _REFUSED_6).items()
]


@dataclass(frozen=True, slots=True)
class Addresses:
    """A rule for addresses: those that are public or in one of the `allowed` networks may be connected to."""

    allowed: tuple[IpNetwork, ...] = ()

    @classmethod
    def of(cls, networks: Iterable[str]) -> Self:
        """Return the rule that allows `networks`, which are texts such as `10.1.0.0/16` or `127.0.0.1`.

        Raise ValueError, which quotes the text, if one is not a network.
        """
        return cls(tuple(ip_network(network) for network in networks))

    def fault(self, address: str) -> str | None:
        """Return why `address`, a numeric address, is refused, or None if it is allowed."""
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


def is_loopback(host: str) -> bool:
    """Return True if no other machine can reach a server that listens on `host`, a name or an address.

    That is certain only for `localhost` and loopback addresses. For any other host, return False.
    """
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _inner(address: IpAddress) -> IpAddress:
    """Return the IPv4 address within an IPv4-mapped or NAT64 address. Return any other address unchanged."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address


def _within(address: IpAddress, network: IpNetwork) -> bool:
    return address.version == network.version and address in network

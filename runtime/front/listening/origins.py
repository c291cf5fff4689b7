"""Finds the address at which a caller reaches the gateway, and the caller's own address. A proxy in front of the gateway sends both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address, ip_network
from itertools import chain, islice

from aiohttp import web
from multidict import MultiMapping

_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::[0-9]{1,5})?")

MAX_HOPS = 32
"""The number of addresses that are read from Forwarded, and from X-Forwarded-For, beginning at the right end."""
_FOR = re.compile(r'(?:^|;)\s*for\s*=\s*"?([^";]*)', re.IGNORECASE)


class Origins:
    """The origins of requests. Links in responses begin with them.

    A proxy sends the origin in Forwarded (RFC 7239), or in X-Forwarded-Proto and X-Forwarded-Host. These headers count
    only from proxies in the trusted networks, because any other client can send them, too.
    """

    def __init__(self, trusted: Iterable[str]) -> None:
        """`trusted` are networks as texts, such as 10.0.0.0/8."""
        self._trusted = tuple(ip_network(network) for network in trusted)
        self.trusts_some = bool(self._trusted)

    def of(self, request: web.Request) -> str:
        """Return the scheme, host and port of a request, as `https://models.example:8443`."""
        scheme, host = self._told(request) if self.trusts(request.remote) else ("", "")
        if scheme or host:
            request = request.clone(scheme=scheme or request.scheme, host=host or request.host)
        return str(request.url.origin())

    def trusts(self, address: str | None) -> bool:
        """Return True if `address` is that of a proxy whose headers count."""
        if not self._trusted or not address:
            return False
        try:
            found = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        plain = getattr(found, "ipv4_mapped", None) or found
        return any(plain in network for network in self._trusted)

    def client_of(self, headers: Mapping[str, str], remote: str | None) -> str:
        """Return the IP address of a request's client; "" for a request over a unix socket. `remote` is the address of
        the request's connection.

        Each proxy adds, at the right end of Forwarded or X-Forwarded-For, the address that it was called from. So the
        client is the rightmost address that is no trusted proxy. Addresses left of it may be forged. If the two headers
        name different clients, the caller may have forged one of them, and `remote` is returned.
        """
        client = remote or ""
        if self.trusts(client):
            forwarded = [
                match[1] if (match := _FOR.search(part)) else "" for part in _parts(headers, "Forwarded")
            ]
            found = {
                self._rightmost(hops) for hops in (forwarded, _parts(headers, "X-Forwarded-For")) if hops
            }
            if len(found) == 1:
                client = found.pop() or client
        return client

    def _rightmost(self, hops: list[str]) -> str:
        """Return the first address in `hops` that is not a trusted proxy. If all are trusted proxies, return the last
        address. Return "" if the address is not valid.
        """
        address = ""
        for hop in hops:
            address = _address(hop)
            if not self.trusts(address):
                break
        return address

    @staticmethod
    def _told(request: web.Request) -> tuple[str, str]:
        """Return the scheme and the host with which the client called the first proxy; "" for a missing or invalid one."""
        headers, first = request.headers, (request.forwarded or ({},))[0]
        scheme = first.get("proto") or headers.get("X-Forwarded-Proto", "").partition(",")[0]
        host = first.get("host") or headers.get("X-Forwarded-Host", "").partition(",")[0]
        scheme, host = scheme.strip().lower(), host.strip()
        return scheme if scheme in ("http", "https") else "", host if _HOST.fullmatch(host) else ""


def network_of(address: str) -> str:
    """Return an address of IPv4, or the network of an IPv6 address. One machine can use all addresses of such a network."""
    with suppress(ValueError):
        if (found := ip_address(address)).version == 6:
            return str(ip_network((found, 64), strict=False))
    return address


def _parts(headers: Mapping[str, str], name: str) -> list[str]:
    """Return the last MAX_HOPS elements of all fields with this name, from the right."""
    fields: Sequence[str] = headers.getall(name, ()) if isinstance(headers, MultiMapping) else ()
    found = chain.from_iterable(reversed(field.rsplit(",", MAX_HOPS)) for field in reversed(fields))
    return [*islice(found, MAX_HOPS)]


def _address(hop: str) -> str:
    """Return the IP address of an element such as 192.0.2.1:4711 or [2001:db8::1]; "" if it has none."""
    text = hop.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text)
    except ValueError:
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)

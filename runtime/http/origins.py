"""Finds the address at which a caller reaches the gateway. This may be the address of a proxy in front of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address, ip_network

from aiohttp import web

_HOST = re.compile(r"[A-Za-z0-9._-]{1,255}(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](?::[0-9]{1,5})?")


class Origins:
    """The origins of requests. Links in responses begin with them.

    A proxy sends the origin in Forwarded (RFC 7239), or in X-Forwarded-Proto and X-Forwarded-Host. These headers count
    only from proxies in the trusted networks, because any other client can send them, too.
    """

    def __init__(self, trusted: Iterable[str]) -> None:
        """`trusted` are networks as texts, such as 10.0.0.0/8."""
        self._trusted = tuple(ip_network(network) for network in trusted)

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

    @staticmethod
    def _told(request: web.Request) -> tuple[str, str]:
        """Return the scheme and the host with which the client called the first proxy; "" for a missing or invalid one."""
        headers, first = request.headers, (request.forwarded or ({},))[0]
        scheme = first.get("proto") or headers.get("X-Forwarded-Proto", "").partition(",")[0]
        host = first.get("host") or headers.get("X-Forwarded-Host", "").partition(",")[0]
        scheme, host = scheme.strip().lower(), host.strip()
        return scheme if scheme in ("http", "https") else "", host if _HOST.fullmatch(host) else ""

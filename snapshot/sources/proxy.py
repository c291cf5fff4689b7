"""Connects to web servers through the HTTP proxies that the environment names.

HTTPS_PROXY is for https, and HTTP_PROXY for http. The same names in lower case take precedence. NO_PROXY lists the
hosts that are reached directly: names with their subdomains, networks such as 10.0.0.0/8, or * for all.
This machine itself is always reached directly.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

import h11

from ..._version import __version__
from ...errors import SourceError
from .location import ServerAddress

_BUFFER_BYTES = 4 << 10


class ProxyError(ConnectionError):
    """A proxy has refused to connect to a server. `status` is the HTTP status of its response."""

    def __init__(self, proxy: Proxy, status: int) -> None:
        super().__init__(f"the proxy {proxy.address} responds with HTTP {status}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Proxy:
    """The address of a proxy, and the headers that only the proxy may receive."""

    address: ServerAddress
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def tunnel(self, connected: socket.socket, origin: ServerAddress, deadline_s: float) -> None:
        """Let the proxy connect this socket with `origin` before the monotonic time `deadline_s`.

        Raise ProxyError if the proxy refuses, another OSError if the connection fails, or h11.RemoteProtocolError if its response is not HTTP.
        """
        parser = h11.Connection(h11.CLIENT)
        host = f"[{origin.host}]" if ":" in origin.host else origin.host
        target = f"{host}:{origin.port}"
        headers = {"Host": target, "User-Agent": f"pilotflame/{__version__}", **self.headers}
        request = h11.Request(method="CONNECT", target=target, headers=list(headers.items()))
        connected.settimeout(max(1e-3, deadline_s - time.monotonic()))
        connected.sendall(parser.send(request) or b"")
        parser.send(h11.EndOfMessage())
        while (event := parser.next_event()) is h11.NEED_DATA or isinstance(event, h11.InformationalResponse):
            if event is h11.NEED_DATA:
                connected.settimeout(max(1e-3, deadline_s - time.monotonic()))
                parser.receive_data(connected.recv(_BUFFER_BYTES))
        if not isinstance(event, h11.Response) or not 200 <= event.status_code < 300:
            raise ProxyError(self, event.status_code if isinstance(event, h11.Response) else 0)
        if parser.trailing_data[0]:
            # Refuse the connection: in TLS, the server sends nothing before it has received bytes, so the proxy sent these bytes.
            raise ConnectionError(f"the proxy {self.address} has sent bytes of its own")


def proxy_for(origin: ServerAddress, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy through which to reach `origin`, or None to connect directly.

    Raise SourceError if the environment names a proxy that cannot be used.
    """
    name = f"{origin.scheme}_proxy"
    url = environ.get(name) or environ.get(name.upper(), "")
    if not url or _is_local(origin.host):
        return None
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY", "")
    if any(_matches(origin, entry.strip().lower()) for entry in exempt.split(",")):
        return None
    return _proxy(name.upper(), url if "://" in url else f"http://{url}")


def _proxy(variable: str, url: str) -> Proxy:
    try:
        address, parts = ServerAddress.of(url), urlsplit(url)
    except ValueError:
        address = None
    if address is None or address.scheme != "http":
        # Do not show the URL, because it may have a password.
        fault = f"{variable} does not name an HTTP proxy."
        raise SourceError(fault, remedy="Write http://host:port, or http://user:password@host:port.")
    if parts.username is None:
        return Proxy(address)
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Proxy(address, {"Proxy-Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"})


def _is_local(host: str) -> bool:
    found = _ip(host)
    return host.rstrip(".") == "localhost" or (found is not None and found.is_loopback)


def _matches(origin: ServerAddress, entry: str) -> bool:
    """Return True if `entry` of NO_PROXY exempts this server."""
    if entry == "*":
        return True
    host, colon, port = entry.rpartition(":")
    if colon and port.isdigit() and "]" not in port and (":" not in host or host.endswith("]")):
        if int(port) != origin.port:
            return False
        entry = host
    entry, found = entry.strip("[]"), _ip(origin.host)
    if found is not None:
        try:
            return found in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            return False
    name, below = origin.host.lower().rstrip("."), entry.removeprefix("*").removeprefix(".").rstrip(".")
    return bool(below) and (name == below or name.endswith(f".{below}"))


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None

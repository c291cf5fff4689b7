"""Opening what strangers name: http, https and data URLs, connected to nothing but addresses that may be called.

The check is made on the address that a socket is about to connect to, again for each redirect. No proxies: behind one,
nobody could check what it connects to.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib import request

from ...addresses import INPUT_NETWORKS, Addresses


def opener(environ: Mapping[str, str] = os.environ) -> request.OpenerDirector:
    """What opens URLs within the policy that the environment says. Raises ValueError if it says none."""
    texts = [text.strip() for text in environ.get(INPUT_NETWORKS, "").split(",")]
    try:
        addresses = Addresses.of(text for text in texts if text)
    except ValueError as error:
        raise ValueError(f"{INPUT_NETWORKS} cannot be taken: {error}") from None
    made = request.OpenerDirector()
    for handler in (
        _Http(addresses), _Https(addresses), request.DataHandler(), request.HTTPRedirectHandler(),
        request.HTTPErrorProcessor(), request.HTTPDefaultErrorHandler(), request.UnknownHandler(),
    ):  # fmt: skip
        made.add_handler(handler)
    return made


class _Http(request.HTTPHandler):
    def __init__(self, addresses: Addresses) -> None:
        super().__init__()
        self._addresses = addresses

    def http_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Plain, addresses=self._addresses), req)


class _Https(request.HTTPSHandler):
    def __init__(self, addresses: Addresses) -> None:
        super().__init__()
        self._addresses = addresses

    def https_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Tls, addresses=self._addresses), req)


class _Plain(http.client.HTTPConnection):
    def __init__(self, host: str, *, addresses: Addresses, **how: Any) -> None:
        super().__init__(host, **how)
        self._addresses = addresses

    def connect(self) -> None:
        self.sock = connected(self.host, self.port, self.timeout, self._addresses)


class _Tls(http.client.HTTPSConnection):
    def __init__(self, host: str, *, addresses: Addresses, **how: Any) -> None:
        self._trust = ssl.create_default_context()
        super().__init__(host, context=self._trust, **how)
        self._addresses = addresses

    def connect(self) -> None:
        plain = connected(self.host, self.port, self.timeout, self._addresses)
        try:
            self.sock = self._trust.wrap_socket(plain, server_hostname=self.host)
        except BaseException:
            plain.close()
            raise


def connected(host: str, port: int, timeout_s: float | None, addresses: Addresses) -> socket.socket:
    """A socket to the first of the host's addresses that may be called and answers. OSError of the last if none does."""
    failed: OSError = OSError("its host has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if reason := addresses.fault(str(address[0])):
            # The address is not told: whoever names a host would learn what it is within our network.
            failed = PermissionError(f"its address may not be fetched from: {reason} (see {INPUT_NETWORKS})")
            continue
        made = socket.socket(family, kind, protocol)
        try:
            made.settimeout(timeout_s)
            made.connect(address)
        except OSError as error:
            made.close()
            failed = error
        else:
            return made
    raise failed

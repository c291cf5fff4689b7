"""Opens http, https and data URLs that callers send, and connects only to allowed addresses.

It checks the address that a socket is about to connect to, and checks again after each redirect. It uses no proxy,
because it could not check the address that a proxy connects to.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
from collections.abc import Mapping
from urllib import request
from urllib.parse import quote, urlsplit, urlunsplit

from ..addresses import INPUT_NETWORKS, Addresses
from ..snapshot.sources.dialer import AddressRefused, Dialer
from ..snapshot.sources.location import PATH, QUERY

MAX_CONNECT_S = 60.0


def encoded(url: str) -> str:
    """Return a URL in the characters that RFC 3986 allows, as browsers send it. Callers may send URLs with spaces and non-ASCII letters."""
    parts = urlsplit(url)
    if parts.scheme == "data" or (url.isascii() and url.isprintable() and " " not in url):
        return url
    host = parts.netloc if parts.netloc.isascii() else parts.netloc.encode("idna").decode()
    path, query = quote(parts.path, PATH), quote(parts.query, QUERY)
    return urlunsplit((parts.scheme, host, path, query, ""))


def opener(environ: Mapping[str, str] = os.environ) -> request.OpenerDirector:
    """Return an opener that connects only to public addresses and the networks that `environ` allows."""
    texts = [text.strip() for text in environ.get(INPUT_NETWORKS, "").split(",")]
    try:
        addresses = Addresses.of(text for text in texts if text)
    except ValueError as error:
        raise ValueError(f"{INPUT_NETWORKS} is malformed: {error}") from None
    director = request.OpenerDirector()
    for handler in (
        _CheckedHandler(Dialer(addresses)), request.DataHandler(), request.HTTPRedirectHandler(), request.UnknownHandler(),
        request.HTTPErrorProcessor(), request.HTTPDefaultErrorHandler(),
    ):  # fmt: skip
        director.add_handler(handler)
    return director


class _CheckedHandler(request.AbstractHTTPHandler):
    """Opens http and https URLs over sockets that the function `connected` returns."""

    def __init__(self, dialer: Dialer) -> None:
        super().__init__()

        class CheckedHttp(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = connected(self.host, self.port, self.timeout, dialer)

        class CheckedHttps(http.client.HTTPSConnection, CheckedHttp):
            """HTTPSConnection.connect first calls `CheckedHttp.connect`, and then starts TLS on its socket."""

        self._plain, self._tls = CheckedHttp, CheckedHttps

    def http_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._plain, req)

    def https_open(self, req: request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._tls, req, context=ssl.create_default_context())

    http_request = https_request = request.AbstractHTTPHandler.do_request_


def connected(host: str, port: int, timeout_s: float | None, dialer: Dialer) -> socket.socket:
    """Connect to an allowed address of a host. Raise OSError, and PermissionError if no address is allowed."""
    try:
        return dialer.dial(host, port, MAX_CONNECT_S if timeout_s is None else timeout_s, timeout_s)
    except AddressRefused as error:
        # The message must not contain the address: it would tell how names resolve within our network.
        message = f"fetching from its address is not allowed: {error.reason} (see {INPUT_NETWORKS})"
        raise PermissionError(message) from None

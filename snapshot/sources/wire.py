"""Defines Wire, a socket to a web server. One thread uses and reconnects it. Any thread may close it."""

from __future__ import annotations

import math
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .dialer import Address, Dialer
from .location import ServerAddress
from .proxy import Proxy, proxy_for
from .socket_stream import SocketStream
from .tls import TlsStream

TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0


class Wire:
    """At most one socket at a time. Only one thread may use it, except that any thread may call `close`.

    `connect`, `send` and `receive` raise OSError. While one of these methods runs, `close` only shuts the socket down,
    and the thread that runs the method closes the descriptor afterwards. If `close` closed the descriptor itself, a
    file that is opened next could get the same number, and the running method would use that file.
    """

    def __init__(
        self,
        trust: Callable[[], ssl.SSLContext],
        dialer: Dialer,
        *,
        connect_timeout_s: float | None = None,
        timeout_s: float | None = None,
        direct: bool = False,
        until_s: float = math.inf,
    ) -> None:
        """A server may be silent for `timeout_s`, by default TIMEOUT_S. Connecting may take `connect_timeout_s`. After the
        monotonic time `until_s`, `connect`, `send` and `receive` raise TimeoutError.

        With `direct`, no proxy is used.
        """
        self.origin: ServerAddress | None = None
        self.forwarder: Proxy | None = None
        """The proxy to which requests for http are sent. Requests for https go through a tunnel instead."""
        self._trust = trust
        self._dialer = dialer
        self._connect_timeout_s = connect_timeout_s or CONNECT_TIMEOUT_S
        self._timeout_s, self._direct, self._until_s = timeout_s or TIMEOUT_S, direct, until_s
        self._lock = threading.Lock()
        # The connected socket. While `connect` runs, all sockets that it tries.
        self._sockets: list[socket.socket] = []
        self._stream: SocketStream | TlsStream | None = None
        self._busy = False
        self._closed = False

    def connect(self, origin: ServerAddress) -> None:
        """Close the current socket and connect a new one to `origin`, with TLS for https, or through a proxy.

        This takes at most `connect_timeout_s` in total. Raise SourceError if the environment names a proxy that cannot
        be used, h11.RemoteProtocolError if the proxy does not use HTTP, and ProxyError or another OSError if connecting fails.
        """
        self.drop()
        deadline_s = time.monotonic() + self._connect_timeout_s
        proxy = None if self._direct else proxy_for(origin)
        with self._lock:
            self._check_open()
            self._busy = True
        try:
            server = proxy.address if proxy is not None else origin
            connected = self._dialer.connect(server.host, server.port, deadline_s, self)
            self._greet(connected, origin, proxy, deadline_s)
        finally:
            self._end_use()
        self.origin = origin
        self.forwarder = proxy if origin.scheme == "http" else None

    def send(self, data: bytes) -> None:
        stream = self._connected()
        try:
            stream.send(data)
        finally:
            self._end_use()

    def receive(self, view: memoryview, limit: int = 0, *, gather: bool = False) -> int:
        """Wait for bytes and receive them into `view`. Return their number: 0 at the end of the stream.

        At most `limit` bytes are received, or as many as fit into `view` if `limit` is 0. With `gather`, wait a few
        milliseconds for the full number (see SocketStream). Use it only if the peer is about to send that number.
        """
        stream = self._connected()
        try:
            return stream.receive(view, limit or len(view), gather=gather)
        finally:
            self._end_use()

    def quiet(self) -> bool:
        """Return True if the socket is open and idle: the server has neither sent more bytes nor closed it."""
        poll = select.poll()
        with self._lock:
            if self._stream is None or not self._stream.idle:
                return False
            poll.register(self._sockets[0], select.POLLIN)
            return not poll.poll(0)

    def drop(self) -> None:
        """Close the current socket, if there is one. Afterwards, `connect` may open another."""
        with self._lock:
            self.origin = self.forwarder = None
            self._discard_all()

    def close(self) -> None:
        """Close the socket for good. A `connect`, `send` or `receive` that waits raises an OSError at once."""
        with self._lock:
            self._closed = True
            if not self._busy:
                self._discard_all()
                return
            for one in self._sockets:
                # Ignore the OSError of a socket that is not connected yet.
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def opened(self, one: socket.socket) -> None:
        """Take over a socket that is being connected. Raise OSError if the wire is closed or its time is over."""
        with self._lock:
            self._sockets.append(one)
            self._check_open()

    def discard(self, one: socket.socket) -> None:
        """Close a socket that `connect` does not use."""
        with self._lock:
            if one in self._sockets:
                self._sockets.remove(one)
            one.close()

    def _greet(
        self, connected: socket.socket, origin: ServerAddress, proxy: Proxy | None, deadline_s: float
    ) -> None:
        """Prepare the socket, which is connected to the proxy or the origin, for requests to the origin."""
        address = Address(connected.family, connected.getpeername())
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.scheme == "https":
                if proxy is not None:
                    proxy.tunnel(connected, origin, deadline_s)
                tls = TlsStream(SocketStream(connected, self._timeout_s), origin, self._trust())
                tls.handshake(deadline_s)
                self._stream = tls
            else:
                self._stream = SocketStream(connected, self._timeout_s)
        except OSError:
            # The fault may concern only the server at this address, so try other addresses first.
            self._dialer.avoid(address)
            raise

    # A context manager would be shorter, but its generator takes a microsecond, and `receive` is called often.
    def _connected(self) -> SocketStream | TlsStream:
        with self._lock:
            self._check_open()
            if self._stream is None:
                raise ConnectionError("not connected")
            self._busy = True
            return self._stream

    def _end_use(self) -> None:
        with self._lock:
            self._busy = False
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            self._discard_all()
            raise ConnectionAbortedError("closed")
        if time.monotonic() > self._until_s:
            raise TimeoutError("timed out")

    def _discard_all(self) -> None:
        for one in self._sockets:
            one.close()
        self._sockets.clear()
        self._stream = None

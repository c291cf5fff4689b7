"""Defines Wire, a socket to a web server. One thread uses and reconnects it. Any thread may close it."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from .location import ServerAddress

TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 10.0


class Wire:
    """At most one socket at a time. Only one thread may use it, except that any thread may call `close`.

    `connect`, `send` and `receive` raise OSError. While one of them runs, `close` only shuts the socket down,
    and the thread that runs it closes the descriptor afterwards. If `close` closed the descriptor itself, a
    file that is opened next could get its number, and the running method would use that file.
    """

    def __init__(self, tls: Callable[[], ssl.SSLContext]) -> None:
        self.origin: ServerAddress | None = None
        self._tls = tls
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._busy = False
        self._closed = False

    def connect(self, origin: ServerAddress) -> None:
        """Close the current socket and connect a new one to `origin`, with TLS for https.

        Tries all addresses of the host, together for at most CONNECT_TIMEOUT_S.
        """
        self.drop()
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        failure: OSError = OSError(f"{origin.host} has no address")
        addresses = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, address in addresses:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            try:
                return self._open(origin, socket.socket(family, kind, protocol), address, left_s)
            except OSError as error:
                self.drop()
                failure = error
                if self._closed or isinstance(error, ssl.SSLCertVerificationError):
                    break
        raise failure

    def send(self, data: bytes) -> None:
        connected = self._begin_use()
        try:
            connected.sendall(data)
        finally:
            self._end_use()

    def receive(self, view: memoryview, limit: int = 0) -> int:
        """Wait for bytes and receive them into `view`. Return their number: 0 at the end of the stream.

        At most `limit` bytes are received, or as many as fit into `view` if `limit` is 0.
        """
        connected = self._begin_use()
        try:
            return connected.recv_into(view, limit)
        finally:
            self._end_use()

    def quiet(self) -> bool:
        """Return True if the socket is open and idle: the server has sent no more bytes and not closed it."""
        poll = select.poll()
        with self._lock:
            if self._socket is None:
                return False
            poll.register(self._socket, select.POLLIN)
            return not poll.poll(0)

    def drop(self) -> None:
        """Close the current socket, if there is one. Afterwards, `connect` may open another."""
        with self._lock:
            self.origin = None
            self._discard()

    def close(self) -> None:
        """Close the socket for good. A waiting `send` or `receive` raises ConnectionAbortedError at once."""
        with self._lock:
            self._closed = True
            if self._socket is None:
                return
            if not self._busy:
                self._discard()
                return
            # An OSError means that the socket is not connected yet.
            with suppress(OSError):
                # SSLSocket.shutdown would remove TLS first, and a reader could then receive ciphertext.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _open(
        self, origin: ServerAddress, raw: socket.socket, address: tuple[object, ...], left_s: float
    ) -> None:
        # Wrap the socket in TLS before it connects. Then `close` can interrupt the handshake too.
        try:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if origin.scheme == "https":
                raw = self._tls().wrap_socket(raw, server_hostname=origin.host)
            raw.settimeout(left_s)
        except BaseException:
            raw.close()
            raise
        with self._lock:
            self._socket = raw
        connected = self._begin_use()
        try:
            connected.connect(address)
            connected.settimeout(TIMEOUT_S)
        finally:
            self._end_use()
        self.origin = origin

    # A context manager would be shorter, but `receive` is called often, and a generator takes a microsecond.
    def _begin_use(self) -> socket.socket:
        with self._lock:
            self._check_open()
            if self._socket is None:
                raise ConnectionError("not connected")
            self._busy = True
            return self._socket

    def _end_use(self) -> None:
        with self._lock:
            self._busy = False
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            self._discard()
            raise ConnectionAbortedError("closed")

    def _discard(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
